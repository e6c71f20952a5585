"""The bug of ``transformers_divides_gradients_twice``, in trainers that have transformers' own step.

They inherit ``Trainer.training_step``. The wrapper stands on TRL's class, and accelerate knows of one micro-batch while
the inherited method runs. Distillation up to 1.9 has a step of its own, in a module that is gone since.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import gradient_of_one_of_two


@wrapper
def have_accelerate_divide_by_one(call: Call) -> Any:
    """Run the step with an accelerator that knows of one micro-batch. DeepSpeed's engine divides by nothing here."""
    accelerator = call.trainer.accelerator
    steps = accelerator.gradient_accumulation_steps
    if steps == 1 or accelerator.distributed_type == "DEEPSPEED":
        return call()
    call.act()
    accelerator.gradient_accumulation_steps = 1
    try:
        return call()
    finally:
        accelerator.gradient_accumulation_steps = steps


def gradient_is_divided_once(module: ModuleType) -> Outcome:
    """Differentiate the loss of one of two micro-batches by its only weight: a half, and a quarter with the bug."""
    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next((value for name, value in vars(module).items() if name.lower() == class_name), None)
    if trainer_class is None or trainer_class.__module__ != module.__name__:
        return absent("this module has no trainer")
    if module_of(trainer_class.training_step) is module and "distillation" not in class_name:
        return absent("this trainer has a step of its own")
    gradient = gradient_of_one_of_two(
        trainer_class,
        # The step of distillation counts.
        _get_liger_zero3_lm_head_gather_ctx=lambda model: nullcontext(),
        **dict.fromkeys(("_buffered_on_policy_flags", "_buffered_inputs"), None),
        **dict.fromkeys(("_buffer_step", "_off_policy_loss_total", "_off_policy_step_equiv"), 0),
    )
    if gradient is None:
        return absent("this transformers tells accelerate of one micro-batch")
    return judge(gradient, right=0.5, wrong=0.25)
