"""The reference of a ``PeftModel`` lacks what has been trained, if its adapter is not a plain LoRA of linear layers.

The trainers add an adapter "ref" and copy the parameters that have ``.default.`` in their names. PEFT keeps a matrix in
a module that has the name of the adapter, and then the name goes on with ``.weight``. A single parameter has the
name of the adapter itself, as ``lora_embedding_A.default`` or ``ia3_l.default``, and is passed over. There "ref"
keeps the values of an adapter that was just made.

The wrapper copies these as soon as the adapter is added: DPO and KTO may precompute the reference in the constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, base_for_adapters, begin_trainer, single_process


@wrapper
def copy_every_weight(call: Call) -> None:
    """Make the trainer with a model whose adapter "ref" is given all weights of the adapter "default"."""
    from peft import PeftModel

    model = call["model"]
    if isinstance(model, PeftModel):
        act, add_adapter = call.act_later(), model.add_adapter

        def add_and_copy(adapter_name: str, *args: Any, **kwargs: Any) -> None:
            add_adapter(adapter_name, *args, **kwargs)
            if adapter_name == "ref":
                _copy(model, act)

        with shadowed(model, "add_adapter", add_and_copy):
            call()
    else:
        call()


def _copy(model: Any, act: Callable[[], None]) -> None:
    """Copy the parameters that have the name of the adapter "default" themselves to those of the adapter "ref"."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        copy = weights.get(f"{name.removesuffix('.default')}.ref")
        # Other parameters have no such copy.
        if copy is not None:
            copy.data.copy_(weight.data)
            act()


def reference_has_every_weight(module: ModuleType) -> Outcome:
    """Measure a weight of the reference's adapter. It is 2 in the trained one, and 0 in a new one."""
    from peft import LoraConfig, get_peft_model

    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    # The constructor may be wrapped.
    if "ref" not in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return absent("in this release this trainer makes no adapter of its own")
    model = get_peft_model(base_for_adapters(), LoraConfig(r=1, target_modules=["embed_tokens"]))
    (name,) = (name for name, _ in model.named_parameters() if name.endswith("lora_embedding_A.default"))
    model.get_parameter(name).data.fill_(2.0)

    def stop(trainer: Any) -> None:
        raise StopConstruction

    with single_process(module):
        begin_trainer(module, trainer_class, model, parent=stop, gradient_checkpointing=False)
    copy = model.get_parameter(name.replace("default", "ref"))
    return judge(float(copy.max()), right=2.0, wrong=0.0)
