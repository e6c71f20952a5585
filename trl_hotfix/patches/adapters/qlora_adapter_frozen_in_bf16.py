"""On a model that is loaded in 4 or 8 bits the trainers cast the adapter to bfloat16, and Adam trains it in bfloat16.

bfloat16 has 8 significant bits. An update that is less than a 512th of a weight rounds to nothing, in every step, and
there is no copy in float32 that could collect them. PEFT makes adapters in float32 for this reason.

The constructors cast ``param.data`` of everything that is trained, after ``get_peft_model`` (TRL pull request 4577).
A cast back would keep the rounding. So the wrapper notes what is trained in float32, of the model and of the model that
``get_peft_model`` returns meanwhile, and puts the numbers back: also if ``__init__`` fails, since a ``PeftModel`` is
the user's. Nothing is put back under DeepSpeed, whose optimizer has a copy in float32, and under FSDP, which shards
weights of one dtype only.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import StopConstruction, absent_if_reexported, base_for_adapters, begin_trainer, single_process


@wrapper
def keep_in_float32(call: Call) -> Any:
    """Make the trainer, and give what is trained the numbers in float32 that it had before."""
    module, weights = module_of(call), _trained_in_float32(call["model"])
    make_adapter = module.get_peft_model

    def make_and_note(*args: Any, **options: Any) -> Any:
        model = make_adapter(*args, **options)
        weights.update(_trained_in_float32(model))
        return model

    # Not ``shadowed``: this alone does not act.
    module.get_peft_model = make_and_note  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        module.get_peft_model = make_adapter  # type: ignore[attr-defined]
        for weight, numbers in weights.items() if not _is_sharded(call.trainer) else ():
            if weight.dtype != numbers.dtype:
                weight.data = numbers.to(weight.device)
                call.act()


def _is_sharded(trainer: Any) -> bool:
    # A trainer whose constructor failed may lack these.
    return getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False)


def _trained_in_float32(model: Any) -> dict[Any, Any]:
    """Return what is trained in float32 of a quantised model, each with its numbers."""
    import torch

    if not (getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)):
        return {}
    return {
        weight: weight.data
        for name, weight in model.named_parameters()
        # DoRA's magnitude vectors have a patch of their own, for the releases that cast them.
        if weight.requires_grad and weight.dtype == torch.float32 and "lora_magnitude_vector" not in name
    }


def adapters_are_in_float32(module: ModuleType) -> Outcome:
    """Read a weight of 3.3, which bfloat16 rounds, when the real constructor hands the model on."""
    from peft import LoraConfig, get_peft_model

    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if (reexported := absent_if_reexported(module, trainer_class.__init__)) is not None:
        return reexported
    constructor = inspect.unwrap(trainer_class.__init__).__code__
    if not {"bfloat16", "get_peft_model"} <= set(constructor.co_names) or "is_loaded_in_8bit" not in str(
        constructor.co_consts
    ):
        return absent("in this release this trainer casts no adapter to bfloat16")
    base = base_for_adapters()
    model = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"]))
    base.is_loaded_in_8bit, base.config.num_labels = True, 1
    (weight, _) = _trained_in_float32(model)
    weight.data.fill_(3.3)
    # What the config of SFT works out after it was made.
    settings: dict[str, Any] = {"loss_type": "nll"} if class_name == "sfttrainer" else {}
    with single_process(module):
        begin_trainer(module, trainer_class, model, parent=_stop, gradient_checkpointing=False, **settings)
    return judge(float(weight.flatten()[0]), right=3.3, wrong=3.296875)


def _stop(trainer: Any) -> None:
    raise StopConstruction
