"""A trainer that is given a ``PeftModel`` fails unless its adapter is called "default".

The trainers give a model with a trained adapter a second one, "ref", a frozen copy of it. They take its configuration
from ``model.peft_config["default"]`` and its weights from the parameters that have ``.default.`` in their names. If
only the lookup were repaired, no weight would be copied, and the reference would be the base model.

So the wrapper does both while the trainer is made: ``peft_config`` is a dict that answers "default" with the
configuration of the active adapter and is unchanged otherwise, and the adapter "ref" that ``add_adapter`` makes is
given the weights of the active one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, base_for_adapters, begin_trainer, single_process


@wrapper
def copy_the_active_adapter(call: Call) -> Any:
    """Make the trainer with a model whose active adapter stands for the default one."""
    from peft import PeftModel

    model = call["model"]
    if not isinstance(model, PeftModel) or "default" in model.peft_config:
        return call()
    active, add_adapter = model.active_adapter, model.add_adapter

    def add_and_copy(adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = add_adapter(adapter_name, *args, **kwargs)
        if adapter_name == "ref":
            _copy(model, active, adapter_name)
        return result

    with _with_default(model, active), shadowed(model, "add_adapter", add_and_copy):
        return call()


class _WithDefault(dict[str, Any]):
    """Answers "default" with the configuration of the active adapter, and does not contain that key."""

    active = ""

    def __missing__(self, name: str) -> Any:
        if name != "default":
            raise KeyError(name)
        return self[self.active]


@contextmanager
def _with_default(model: Any, active: str) -> Iterator[None]:
    adapters = model.peft_config
    with_default = _WithDefault(adapters)
    with_default.active = active
    model.peft_config = with_default
    try:
        yield
    finally:
        # The adapters that the trainer added stay.
        adapters.update(with_default)
        model.peft_config = adapters


def _copy(model: Any, source: str, target: str) -> None:
    """Copy each weight of the adapter ``source`` to the adapter ``target``."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        parts = name.split(".")
        # An adapter may have the name of a module, so each occurrence is tried.
        for position in (index for index, part in enumerate(parts) if part == source):
            target_weight = weights.get(".".join([*parts[:position], target, *parts[position + 1 :]]))
            if target_weight is not None:
                target_weight.data.copy_(weight.data)


def reference_is_a_copy_of_the_adapter(module: ModuleType) -> Outcome:
    """Judge how far a matrix of the adapter "ref" is from that of the adapter "policy".

    With the bug the trainer cannot be made. Without a copy the matrix is 0.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    # The constructor may be wrapped.
    if "ref" not in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return absent("in this release this trainer makes no adapter of its own")
    model = get_peft_model(base_for_adapters(), LoraConfig(r=1, target_modules=["q_proj"]), adapter_name="policy")
    matrices = model.base_model.model.self_attn.q_proj.lora_B
    torch.nn.init.ones_(matrices["policy"].weight)
    try:
        with single_process(module):
            begin_trainer(module, trainer_class, model, parent=_stop, gradient_checkpointing=False)
    except KeyError as error:
        if error.args != ("default",):
            raise
        return judge(1.0, right=0.0, wrong=1.0, error=repr(error))
    return judge(float((matrices["ref"].weight - 1).abs().max()), right=0.0, wrong=1.0)


def _stop(trainer: Any) -> None:
    raise StopConstruction
