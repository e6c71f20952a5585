"""A trainer that is given a ``PeftModel`` fails unless its adapter is called "default".

GRPO and RLOO from 0.27.0 on, DPO from 0.29.0 and KTO from 1.8.0 give a model with a trained adapter a second one,
"ref", that stays as the adapter is now. They take its configuration from ``model.peft_config["default"]`` and its
weights from the parameters that have ``.default.`` in their names. An adapter of another name, as
``get_peft_model(model, config, adapter_name="policy")`` makes it, is ``KeyError: 'default'``. If nothing but the lookup
were repaired, no weight would be copied, and the reference would be the base model.

Here ``peft_config`` answers "default", while the trainer is made, with the configuration of the active adapter, and
nothing else about it is different; and what ``add_adapter`` makes as "ref" is given the weights of the active one. A
model that has an adapter called "default" is not touched, nor one of which several adapters are active. Not repaired:
``modules_to_save`` of an adapter of another name has parameters whose names GRPO and RLOO do not know to hand to vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..stubs import StopConstruction, begin_trainer


def copy_the_active_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the trainer with a model that says which of its adapters is the default."""
    model = argument(wrapped, args, kwargs, "model")
    adapters, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    if not isinstance(adapters, dict) or not isinstance(active, str) or "default" in adapters or active not in adapters:
        return wrapped(*args, **kwargs)
    add_adapter = model.add_adapter

    def add_and_copy(adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = add_adapter(adapter_name, *args, **kwargs)
        if adapter_name == "ref":
            _copy(model, active, adapter_name)
        return result

    with _with_default(model, active), shadowed(model, "add_adapter", add_and_copy):
        return wrapped(*args, **kwargs)


class _WithDefault(dict[str, Any]):
    """Has no "default" and answers with the configuration of the active adapter where it is asked for."""

    active = ""

    def __missing__(self, name: str) -> Any:
        if name != "default":
            raise KeyError(name)
        return self[self.active]


@contextmanager
def _with_default(model: Any, active: str) -> Iterator[None]:
    before = model.peft_config
    named = _WithDefault(before)
    named.active = active
    model.peft_config = named
    try:
        yield
    finally:
        # The adapters that were added stay.
        before.update(named)
        model.peft_config = before


def _copy(model: Any, source: str, target: str) -> None:
    """Give each weight of the adapter ``target`` the value of that of ``source``."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        parts = name.split(".")
        # An adapter may be called like a module.
        for place in (place for place, part in enumerate(parts) if part == source):
            its = weights.get(".".join([*parts[:place], target, *parts[place + 1 :]]))
            if its is not None:
                its.data.copy_(weight.data)


def reference_is_a_copy_of_the_adapter(module: ModuleType) -> Outcome:
    """Which value have the LoRA matrices of "ref" in a trainer whose model has an adapter "policy", all of 0.5?

    With the bug there is no such trainer. Without a copy half of them are 0.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    if not _makes_a_reference_adapter(trainer_class):
        return absent("in this release this trainer makes no adapter of its own")
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    model = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"]), adapter_name="policy")
    for name, weight in model.named_parameters():
        if ".policy." in name:
            torch.nn.init.constant_(weight, 0.5)

    def enough(trainer: Any) -> None:
        raise StopConstruction

    before = model.peft_config
    try:
        begin_trainer(module, trainer_class, model, parent=enough)
    except KeyError as error:
        if error.args != ("default",):
            raise
        return judge(0.0, right=0.5, wrong=0.0, error=repr(error))
    copies = [weight.detach() for name, weight in model.named_parameters() if ".ref." in name]
    if model.peft_config is not before or list(before) != ["policy", "ref"] or model.active_adapter != "policy":
        raise AssertionError(f"the model is left with {model.peft_config}, and {model.active_adapter!r} is active")
    return judge(float(torch.cat([each.flatten() for each in copies]).mean()), right=0.5, wrong=0.0)


def _makes_a_reference_adapter(trainer_class: Any) -> bool:
    """Does ``__init__``, which may be wrapped, name it?"""
    constants = inspect.unwrap(trainer_class.__init__).__code__.co_consts
    return "ref" in constants
