"""The facts of a model's weights, its attention and its forward, by the names of ``catalogue.facts``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..authoring import virtual_tokens_come_first, why_sequences_mix
from ..catalogue.conditions import Argument
from ..matching import versions
from ..matching.model_configs import known, unknown
from . import launch_facts
from .models_within import config_of, without_wrappers

_MODEL = "model"


def _quantized(trainer: Any) -> Argument:
    model = without_wrappers(trainer.model)
    return known(any(getattr(model, f"is_loaded_in_{bits}bit", False) is True for bits in (4, 8)), _MODEL)


def _dtype(trainer: Any) -> Argument:
    adapters = {*getattr(trainer.model, "peft_config", ())}
    named = _parameters(trainer)
    return _only_dtype(part for name, part in named if not _is_of_adapter(name, adapters))


def _is_of_adapter(name: str, adapters: set[str]) -> bool:
    return bool(adapters) and ("lora_" in name or not adapters.isdisjoint(name.split(".")))


def _trained_dtype(trainer: Any) -> Argument:
    return _only_dtype(part for _, part in _parameters(trainer) if part.requires_grad)


def _only_dtype(parameters: Iterator[Any]) -> Argument:
    names = sorted({str(part.dtype).rpartition(".")[2] for part in parameters})
    if len(names) != 1:
        return unknown(f"the weights have the dtypes {', '.join(names)}" if names else "there are no such weights")
    return known(names[0], _MODEL)


def _frozen_parameters(trainer: Any) -> Argument:
    return known(any(not part.requires_grad for _, part in _parameters(trainer)), _MODEL)


def _plain_lora(trainer: Any) -> Argument:
    # A weight that is no matrix of a linear layer has no module of its own, but the name of its adapter.
    return known(not any(name.endswith(".default") for name, _ in _parameters(trainer)), _MODEL)


def _parameters(trainer: Any) -> list[tuple[str, Any]]:
    """Return the names and parameters. FSDP has others in their place. Raises ``NotImplementedError`` under it."""
    if launch_facts.distributed(trainer).value == "fsdp":
        raise NotImplementedError
    return list(trainer.model.named_parameters())


def _default_attention(trainer: Any) -> Argument:
    model = without_wrappers(trainer.model)
    chosen = getattr(model.config, "_attn_implementation", None)
    supports = getattr(model, "_supports_sdpa", None)
    if chosen == "sdpa":
        return known(True, _MODEL)
    if not isinstance(chosen, str) or not isinstance(supports, bool):
        return unknown("the model does not say which attention it has")
    return known(chosen == "eager" and not supports, _MODEL)


def _attends_across(trainer: Any) -> Argument:
    import transformers

    chosen = getattr(config_of(trainer.model), "_attn_implementation", None)
    if isinstance(chosen, str) and "flash" in chosen:
        return known(False, _MODEL)
    if not isinstance(chosen, str) or chosen not in ("eager", "sdpa"):
        return unknown("the model does not say which attention it has")
    # From 4.53 on the position ids make a mask, if there is no KV cache and the model makes none itself.
    if versions.in_range(transformers.__version__, "<4.53.0"):
        return known(True, _MODEL)
    return unknown("the model may have a KV cache, or make its mask itself")


def _mixes_sequences(trainer: Any) -> Argument:
    return known(why_sequences_mix(trainer.model, no_cache=True) is not None, _MODEL)


def _soft_prompt(trainer: Any) -> Argument:
    return known(virtual_tokens_come_first(trainer.model), _MODEL)


def _forward_kwargs(trainer: Any) -> Argument:
    parameters = inspect.signature(without_wrappers(trainer.model).forward).parameters.values()
    return known(any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters), _MODEL)


FACTS: Mapping[str, Callable[[Any], Argument]] = {
    "quantized": _quantized,
    "dtype": _dtype,
    "trained_dtype": _trained_dtype,
    "frozen_parameters": _frozen_parameters,
    "plain_lora": _plain_lora,
    "attends_across": _attends_across,
    "mixes_sequences": _mixes_sequences,
    "soft_prompt": _soft_prompt,
    "default_attention": _default_attention,
    "forward_kwargs": _forward_kwargs,
}
