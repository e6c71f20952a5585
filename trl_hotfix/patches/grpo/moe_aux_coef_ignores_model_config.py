"""The trainers ignore the ``router_aux_loss_coef`` of the model's config and give the auxiliary loss the weight 0.001.

SFT, GRPO and RLOO take the coefficient from their arguments since TRL 1.7.0 (pull requests 6083 and 6085), DPO and KTO
since 1.8.0 (6208 and 6275). In TRL 1.14.0 (issue 7222, pull request 7248) the argument is None unless it is set, and
then the config decides.

The arguments have the config's value only while the trainer is created, so that they can be used again for another
model. A callback sets it when the superclass has finished its own set-up: the model is loaded by then, even if it was
given as a name. DPO, KTO and SFT read the argument after that, SFT to overwrite the config. GRPO and RLOO have read it
before, so the attributes that they derive from it are set again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act_of_this_call, argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import default_arguments, recorded_warnings, tiny_causal_lm

_UNSET = 0.001


def use_coefficient_of_config(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``__init__`` with the coefficient that the model's config declares, if the arguments set none."""
    from transformers import TrainerCallback

    changed: list[Any] = []
    act = act_of_this_call()

    class WhenLoaded(TrainerCallback):  # type: ignore[misc]
        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            # In a vision-language model the config of the text model has the router settings.
            config = model.config.get_text_config()
            coefficient = getattr(config, "router_aux_loss_coef", None)
            is_moe = getattr(config, "output_router_logits", None) is not None
            if args.router_aux_loss_coef != _UNSET or not is_moe or coefficient in (None, _UNSET):
                return
            act()
            changed.append(args)
            # GRPO and RLOO have read the argument; the others set their attributes from it after this.
            args.router_aux_loss_coef = instance.router_aux_loss_coef = coefficient
            instance.aux_loss_enabled = coefficient != 0.0
            if state.is_world_process_zero:
                logging.getLogger("trl_hotfix").warning(
                    "router_aux_loss_coef is %g in the config of the model, and %g in %s, which is its default: %g is "
                    "used. If you want %g, set it in model.config.",
                    *(coefficient, _UNSET, type(args).__name__, coefficient, _UNSET),
                )

    callback = WhenLoaded()
    callbacks = argument(wrapped, args, kwargs, "callbacks") or []
    args, kwargs = replaced_argument(wrapped, args, kwargs, "callbacks", [*callbacks, callback])
    try:
        result = wrapped(*args, **kwargs)
    finally:
        for settings in changed:
            settings.router_aux_loss_coef = _UNSET
    instance.remove_callback(callback)
    return result


def coefficient_is_that_of_the_config(module: ModuleType) -> Outcome:
    """Read the coefficient of a trainer with default arguments, and of one whose arguments set it, which must win."""
    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    config_class = getattr(module, f"{method}Config", None)
    if config_class is None or "router_aux_loss_coef" not in {field.name for field in fields(config_class)}:
        return absent("the trainer's arguments have no coefficient in this release")
    declared, chosen = 0.5, 0.25
    default = default_arguments(config_class).router_aux_loss_coef
    used = _coefficient_of_trainer(module, method, declared, default)
    if (set_by_user := _coefficient_of_trainer(module, method, declared, chosen)) != chosen:
        raise AssertionError(f"{chosen} in the arguments, and {set_by_user!r} is used")
    outcome = judge(used, right=declared, wrong=_UNSET, argument=str(default))
    if outcome.verdict is Verdict.FIXED and (mistakes := _mistakes_of_stand_ins()):
        raise AssertionError("; ".join(mistakes))
    return outcome


class _Trainer:
    """It reads the coefficient before its callbacks are called, as GRPO does."""

    router_aux_loss_coef, aux_loss_enabled = _UNSET, True

    def construct(self, config: Mapping[str, Any], args: Any, is_main: bool, callbacks: list[Any] | None) -> None:
        text = SimpleNamespace(**config)
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
        state = SimpleNamespace(is_world_process_zero=is_main)
        self.callbacks = callbacks or []
        for callback in self.callbacks:
            callback.on_init_end(args, state, None, model=model)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks.remove(callback)


def _mistakes_of_stand_ins() -> list[str]:
    """Return what is wrong for several configs: the coefficient, the callbacks, or the warning."""
    from transformers import TrainerCallback

    routers = {"output_router_logits": False}
    # The config, whether the rank is the main one, the callbacks; the coefficient and the number of warnings.
    cases: dict[str, tuple[dict[str, Any], bool, list[Any] | None, float, int]] = {
        "a coefficient": ({**routers, "router_aux_loss_coef": 0.5}, True, [TrainerCallback()], 0.5, 1),
        "another rank": ({**routers, "router_aux_loss_coef": 0.5}, False, None, 0.5, 0),
        "a coefficient of 0": ({**routers, "router_aux_loss_coef": 0.0}, True, [], 0.0, 1),
        "the default": ({**routers, "router_aux_loss_coef": _UNSET}, True, None, _UNSET, 0),
        "no value": ({**routers, "router_aux_loss_coef": None}, True, None, _UNSET, 0),
        "no coefficient": (routers, True, None, _UNSET, 0),
        "no routers": ({"router_aux_loss_coef": 0.5}, True, None, _UNSET, 0),
    }
    mistakes = []
    for name, (config, is_main, callbacks, right, warnings) in cases.items():
        trainer, args = _Trainer(), SimpleNamespace(router_aux_loss_coef=_UNSET)
        with recorded_warnings() as messages:
            use_coefficient_of_config(trainer.construct, trainer, (config, args, is_main, callbacks), {})
        used = trainer.router_aux_loss_coef, trainer.aux_loss_enabled, args.router_aux_loss_coef
        if used != (right, right != 0.0, _UNSET):
            mistakes.append(f"{name}: {used} is used")
        if trainer.callbacks != (callbacks or []):
            mistakes.append(f"{name}: the trainer has the callbacks {trainer.callbacks}")
        if [f"router_aux_loss_coef is {right:g} in" in message for message in messages] != [True] * warnings:
            mistakes.append(f"{name}: the warnings are {messages}")
    return mistakes


class _StopConstruction(Exception):
    """Raised when the trainer has set what the self-test reads."""


def _coefficient_of_trainer(module: ModuleType, method: str, declared: float, argument_value: Any) -> float:
    """Return the coefficient after ``__init__`` of the trainer, on a superclass that only calls the callbacks."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState

    trainer_class, config_class = getattr(module, f"{method}Trainer"), getattr(module, f"{method}Config")

    class Parent(*trainer_class.__bases__):  # type: ignore[misc]
        def __init__(self, *, model: Any, args: Any, callbacks: Any, processing_class: Any, **kwargs: Any) -> None:
            self.model, self.args = model, args
            self.accelerator = SimpleNamespace(parallelism_config=None)
            self.callback_handler = CallbackHandler(
                [DefaultFlowCallback, *(callbacks or [])], model, processing_class, None, None
            )
            self.callback_handler.on_init_end(args, TrainerState(is_world_process_zero=False), TrainerControl())

    class Stub(trainer_class, Parent):  # type: ignore[misc, valid-type]
        # After the metrics __init__ seeds the process and, later, generates.
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_metrics":
                raise _StopConstruction

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    text = SimpleNamespace(router_aux_loss_coef=declared, output_router_logits=False)
    config: Any = SimpleNamespace(get_text_config=lambda: text, _attn_implementation="sdpa")
    model = tiny_causal_lm(config)
    model.generation_config = SimpleNamespace(eos_token_id=None)
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    # No reference model is loaded, and the forward of the model is not replaced.
    quick: dict[str, dict[str, Any]] = {"SFT": {"loss_type": "nll"}, "RLOO": {"beta": 0.0}}
    quick["GRPO"] = {"beta": 0.0, "steps_per_generation": 1, "generation_batch_size": 8}
    args = default_arguments(config_class, router_aux_loss_coef=argument_value, n_gpu=0, **quick.get(method, {}))
    extra = {"reward_funcs": len} if method in ("GRPO", "RLOO") else {}
    extra |= {"ref_model": tiny_causal_lm(config)} if method in ("DPO", "KTO") else {}
    trainer: Any = object.__new__(Stub)
    with suppress(_StopConstruction):
        Stub.__init__(
            trainer,
            model=model,
            args=args,
            **extra,
            train_dataset=Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"),
        )
    if args.router_aux_loss_coef != argument_value:
        raise AssertionError(f"{argument_value} in the arguments, and {args.router_aux_loss_coef!r} afterwards")
    enabled, coefficient = trainer.aux_loss_enabled, getattr(trainer, "router_aux_loss_coef", text.router_aux_loss_coef)
    if not enabled:
        raise AssertionError(f"the auxiliary loss is off, with a coefficient of {coefficient!r}")
    return float(coefficient)
