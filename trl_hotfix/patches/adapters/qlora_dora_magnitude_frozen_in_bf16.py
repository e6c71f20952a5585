"""On a model that is loaded in 4 or 8 bits the trainers cast DoRA's magnitude vectors to bfloat16, with all adapters.

They cast ``param.data`` of everything that trains, after ``get_peft_model``, in the middle of ``__init__``.
An update of a magnitude, of about the learning rate, is less than half of what bfloat16 can tell apart from it. TRL
1.15.0 leaves out the parameters that have ``lora_magnitude_vector`` in their names (issue 7268).

A cast back would keep the rounding. So the wrapper notes the vectors of the model, and of the model that
``get_peft_model`` returns meanwhile, and puts their own numbers back: also if ``__init__`` fails, since a ``PeftModel``
is the user's.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import StopConstruction, absent_if_reexported, base_for_adapters, begin_trainer, single_process


@wrapper
def keep_magnitudes(call: Call) -> Any:
    """Make the trainer, and give DoRA's magnitude vectors the numbers and the dtype that they had before."""
    module, magnitudes = module_of(call), _magnitudes(call["model"])
    make_adapter = module.get_peft_model

    def make_and_note(*args: Any, **options: Any) -> Any:
        model = make_adapter(*args, **options)
        magnitudes.update(_magnitudes(model))
        return model

    # Not ``shadowed``: this alone does not act.
    module.get_peft_model = make_and_note  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        module.get_peft_model = make_adapter  # type: ignore[attr-defined]
        for weight, numbers in magnitudes.items():
            if weight.dtype != numbers.dtype:
                weight.data = numbers.to(weight.device)
                call.act()


def _magnitudes(model: Any) -> dict[Any, Any]:
    """Return DoRA's magnitude vectors in a model, each with its numbers; none if the model is not loaded yet."""
    if not hasattr(model, "named_parameters"):
        return {}
    return {weight: weight.data for name, weight in model.named_parameters() if "lora_magnitude_vector" in name}


def magnitudes_are_in_float32(module: ModuleType) -> Outcome:
    """Read a magnitude of 3.3, which bfloat16 rounds, when the real constructor hands the model on."""
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
    model = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"], use_dora=True))
    base.is_loaded_in_8bit, base.config.num_labels = True, 1
    (magnitude,) = _magnitudes(model)
    magnitude.data.fill_(3.3)
    # What the config of SFT works out after it was made.
    settings: dict[str, Any] = {"loss_type": "nll"} if class_name == "sfttrainer" else {}
    with single_process(module):
        begin_trainer(module, trainer_class, model, parent=_stop, gradient_checkpointing=False, **settings)
    return judge(float(magnitude.flatten()[0]), right=3.3, wrong=3.296875)


def _stop(trainer: Any) -> None:
    raise StopConstruction
