"""A ``PeftModel`` that comes with a ``peft_config`` is wrapped once more, and its trained adapter is lost.

``get_peft_model`` puts LoRA of the new config into the layers that have the old adapter. One of the same name,
"default", is initialised again; one of another name stays in the layer and is not active any more. With other modules
or another method the old adapter goes on to be a part of the model, but the reference, adapters off, is the base.

From TRL 0.22.0 on ``merge_and_unload`` comes first. The wrapper does the same at the same place, in the
``get_peft_model`` of the trainer's module. So an error there, as for a model that cannot be merged, is raised within
TRL's method: it ends the run and does not switch the patch off.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, default_arguments


@wrapper
def merge_the_adapter_first(call: Call) -> Any:
    """Let TRL make the new adapter on a base into which the adapter of the ``PeftModel`` is merged."""
    from peft import PeftModel

    if not isinstance(call["model"], PeftModel) or call["peft_config"] is None:
        return call()
    module = module_of(call)
    get_peft_model = module.get_peft_model

    def get_merged_peft_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Another thread may make a trainer of a model without an adapter meanwhile.
        return get_peft_model(_merged(model) if isinstance(model, PeftModel) else model, *args, **kwargs)

    with shadowed(module, "get_peft_model", get_merged_peft_model):
        return call()


def _merged(model: Any) -> Any:
    if not hasattr(model, "merge_and_unload"):
        raise ValueError(
            f"peft_config is given with a PeftModel, and its adapter ({type(model.active_peft_config).__name__}) "
            "cannot be merged into the base model to make room for a new one; leave peft_config out to go on training "
            "it (trl_hotfix: peft-config-reinitialises-peftmodel)"
        )
    base = model.merge_and_unload()
    # Older PEFT leaves the name of the old adapter there. It would be saved with the new one, without weights.
    vars(base).pop("peft_config", None)
    return base


def new_adapter_begins_where_the_old_one_ended(module: ModuleType) -> Outcome:
    """Count the trained adapters beneath a new one: none if the old one is merged."""
    import torch
    from peft import PeftConfig, PeftModel

    if not _puts_an_adapter_on_every_model(module):
        return absent("this release merges the adapter or refuses it, or leaves this to another method")
    base, beneath = torch.nn.Linear(1, 1), []

    class Trained(PeftModel):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = SimpleNamespace(_name_or_path="")

        def get_base_model(self) -> Any:
            return base

        def merge_and_unload(self) -> Any:
            return base

    def get_peft_model(model: Any, *args: Any, **kwargs: Any) -> None:
        beneath.append(model)
        raise StopConstruction

    with shadowed(module, "get_peft_model", get_peft_model), suppress(StopConstruction):
        if hasattr(module, "GRPOTrainer"):
            settings = default_arguments(module.GRPOConfig, gradient_checkpointing=False)
            module.GRPOTrainer(Trained(), len, settings, processing_class=len, peft_config=PeftConfig())
        else:
            settings = SimpleNamespace(bf16=False, gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
            object.__new__(module.SFTTrainer)._prepare_peft_model(Trained(), PeftConfig(), settings)
    if not beneath:
        return absent("this release leaves a PeftModel as it is")
    return judge(sum(isinstance(model, PeftModel) for model in beneath), right=0, wrong=1)


def _method(module: ModuleType) -> Any:
    if hasattr(module, "GRPOTrainer"):
        return module.GRPOTrainer.__init__
    return getattr(module.SFTTrainer, "_prepare_peft_model", None)


def _puts_an_adapter_on_every_model(module: ModuleType) -> bool:
    """Return whether TRL's method, which may be wrapped, calls ``get_peft_model``, and no line merges or refuses."""
    code = getattr(inspect.unwrap(_method(module)), "__code__", None)
    if code is None or "get_peft_model" not in code.co_names:
        return False
    return "merge_and_unload" not in code.co_names and "together with a `peft_config`" not in str(code.co_consts)
