"""The facts of a trainer that begins to train: its model, tokenizer and launch, by the names of ``catalogue.facts``.

Nothing here raises into a run, reads an element of a tensor or changes what it looks at. A fact that
we cannot read is unknown, with a reason. Where TRL has overwritten a value of the config, the loaded model's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..catalogue.conditions import UNSET, Argument
from ..catalogue.facts import FACTS, OF_DATASETS
from ..matching import model_configs
from ..matching.model_configs import known, unknown
from . import launch_facts, weight_facts
from .dataset_facts import dataset_fact
from .models_within import config_of, tokenizer_of, without_wrappers

_CONFIG, _GENERATION, _TOKENIZER = "model.config", "generation_config", "tokenizer"
_MESSAGES = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]


class TrainerFacts:
    """The facts of one trainer. ``known`` has those that it was asked for before, and gets the others."""

    def __init__(self, trainer: Any, known: dict[str, Argument] | None = None) -> None:
        self._trainer, self._known = trainer, {} if known is None else known

    def find(self, name: str) -> Argument:
        """Return a fact. It never raises: what a model or a tokenizer raises makes it unknown."""
        if name not in self._known:
            self._known[name] = self._ask(name)
        return self._known[name]

    def _ask(self, name: str) -> Argument:
        try:
            if name in OF_DATASETS:
                return dataset_fact(self._trainer, name)
            return _FACTS[name](self._trainer)
        # They are objects of the program, whose attributes and methods may raise anything.
        except Exception as error:  # noqa: BLE001
            return unknown(f"{FACTS.get(name, name)}: it cannot be asked for ({type(error).__name__})")


# Of the model's config.


def _of_config(judge: Callable[[Mapping[str, Any], str], Argument]) -> Callable[[Any], Argument]:
    def fact(trainer: Any) -> Argument:
        return judge(config_of(trainer.model).to_dict(), _CONFIG)

    return fact


def _output_router_logits(trainer: Any) -> Argument:
    if _writes_into_config(trainer):
        return unknown("TRL has set output_router_logits")
    return _of_text_too(trainer, "output_router_logits")


def _router_aux_loss_coef(trainer: Any) -> Argument:
    if not _writes_into_config(trainer):
        return _of_text_too(trainer, "router_aux_loss_coef")
    # The model keeps the coefficient with which it was loaded.
    own = getattr(without_wrappers(trainer.model), "router_aux_loss_coef", None)
    return known(own, "model") if isinstance(own, float) else unknown("TRL has set router_aux_loss_coef")


def _writes_into_config(trainer: Any) -> bool:
    """Return whether TRL has written into the config what is in its own arguments: SFT does from 1.7.0 on."""
    is_sft = any(cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__)
    return is_sft and hasattr(trainer.args, "router_aux_loss_coef")


def _of_text_too(trainer: Any, name: str) -> Argument:
    """Return a value of the config. Of releases that differ in it, some read that of its ``text_config``."""
    config = config_of(trainer.model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    value, of_text = getattr(config, name, None), getattr(text, name, None)
    if value != of_text:
        return unknown(f"{_CONFIG} and its text_config have another {name}")
    return known(value, _CONFIG) if value is not None else UNSET


def _model_type(trainer: Any) -> Argument:
    return known(config_of(trainer.model).model_type, _CONFIG)


def _labels(trainer: Any) -> Argument:
    return known(config_of(trainer.model).num_labels, _CONFIG)


def _sampling_settings(trainer: Any) -> Argument:
    config = getattr(without_wrappers(trainer.model), "generation_config", None)
    if config is None:
        return unknown(f"the model has no {_GENERATION}")
    return model_configs.sampling_settings(config.to_diff_dict(), _GENERATION)


# Of the tokenizer.


def _pad_is_eos(trainer: Any) -> Argument:
    tokenizer = tokenizer_of(trainer)
    if tokenizer.eos_token_id is None:
        return unknown("the tokenizer has no eos_token")
    return known(tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id, _TOKENIZER)


def _other_ends(trainer: Any) -> Argument:
    own = tokenizer_of(trainer).eos_token_id
    ends = getattr(getattr(without_wrappers(trainer.model), "generation_config", None), "eos_token_id", None)
    listed = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    if own is None or not listed or not all(type(token_id) is int for token_id in listed):
        return unknown(f"the {_GENERATION} or the tokenizer has no end-of-sequence token")
    return known(set(listed) != {own}, _GENERATION)


def _template_end(trainer: Any) -> Argument:
    tokenizer = tokenizer_of(trainer)
    text = tokenizer.apply_chat_template(_MESSAGES, tokenize=False)
    _, answer, behind = text.rpartition(_MESSAGES[-1]["content"])
    if not answer:
        return unknown("the chat template changes a message")
    if not behind.strip():
        return known("nothing", "chat template") if not behind else unknown("the chat template ends with blanks")
    end, eos, blanks = behind.partition(tokenizer.eos_token)
    if end.strip() or not eos or blanks.strip():
        return unknown("the chat template ends a message with another token")
    return known("eos and blanks" if blanks else "eos", "chat template")


def _adds_bos(trainer: Any) -> Argument:
    tokenizer = tokenizer_of(trainer)
    if tokenizer.bos_token_id is None:
        return known(False, _TOKENIZER)
    return known(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id], _TOKENIZER)


_FACTS: Mapping[str, Callable[[Any], Argument]] = {
    **launch_facts.FACTS,
    **weight_facts.FACTS,
    "experts": _of_config(model_configs.experts),
    "output_router_logits": _output_router_logits,
    "router_aux_loss_coef": _router_aux_loss_coef,
    "router_loss": _of_config(model_configs.router_loss),
    "model_type": _model_type,
    "scales_logits": _of_config(model_configs.scales_logits),
    "labels": _labels,
    "pad_is_eos": _pad_is_eos,
    "other_ends": _other_ends,
    "sampling_settings": _sampling_settings,
    "adds_bos": _adds_bos,
    "template_end": _template_end,
}
