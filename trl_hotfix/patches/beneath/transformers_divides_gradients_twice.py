"""transformers 5.2 to 5.5.3 divide the gradients of a trainer by ``gradient_accumulation_steps`` twice.

``Trainer.training_step`` divides the loss of a micro-batch by the micro-batches of the step, or has it divided by the
tokens of the step. transformers 5.2 begins to give accelerate the number of micro-batches too, as ``num_steps`` of a
``GradientAccumulationPlugin``, and ``Accelerator.backward`` divides by it once more. transformers 5.5.4 gives it 1.

The wrapper gives accelerate 1 for the time of ``training_step``. Online DPO, XPO and Nash-MD have a step of their own,
which does not divide: what accelerate divides there stays.
"""

from __future__ import annotations

from collections import defaultdict
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
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if module_of(trainer_class.training_step) is not module:
        return absent("this module has no trainer with a step of its own")
    gradient = gradient_of_one_of_two(
        trainer_class,
        maybe_activation_offload_context=nullcontext(),
        # The steps of GRPO, RLOO and distillation count, and take the time.
        _step=0,
        _current_train_step_time=0.0,
        _metrics={"train": defaultdict(list)},
    )
    if gradient is None:
        return absent("this transformers tells accelerate of one micro-batch")
    return judge(gradient, right=0.5, wrong=0.25)
