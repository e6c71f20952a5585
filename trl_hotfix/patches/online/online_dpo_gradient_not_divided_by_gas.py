"""Online DPO, XPO and Nash-MD add up the gradients of the micro-batches instead of taking their mean.

Each of the three has a ``training_step`` of its own. It passes the undivided loss to ``accelerator.backward`` and
divides by ``gradient_accumulation_steps`` only the loss that it returns, which is logged. Up to transformers 4.45
accelerate divided the loss. Since 4.46 ``Trainer`` does not tell accelerate about the accumulation ("We explicitly
don't rely on the `Accelerator` to do gradient accumulation") and divides in its own ``training_step``, which is not
called here.

The wrapper passes ``loss / micro-batches of this step`` to ``accelerator.backward``, as ``Trainer`` does. It relies
on two other places that divide: the ``backward`` of a DeepSpeed engine, and ``accelerator.backward`` itself if
``accelerator.gradient_accumulation_steps`` is not 1.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, micro_batches, shadowed, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, online_dpo_stub


@wrapper
def take_the_mean_of_the_micro_batches(call: Call) -> Any:
    """Run the step with an ``accelerator.backward`` that divides the loss by the micro-batches of this step."""
    accelerator, steps = call.trainer.accelerator, micro_batches(call.trainer)
    already_divided = accelerator.distributed_type == "DEEPSPEED" or accelerator.gradient_accumulation_steps != 1
    if steps == 1 or already_divided:
        return call()
    backward = accelerator.backward

    def backward_of_share(loss: Any, **options: Any) -> Any:
        return backward(loss / steps, **options)

    with shadowed(accelerator, "backward", backward_of_share):
        return call()


def gradient_is_the_mean_of_the_micro_batches(module: ModuleType) -> Outcome:
    """Compare the loss that ``backward`` is called with in one of four micro-batches with the logged one."""
    class_names = {"xpo_trainer": "XPOTrainer", "nash_md_trainer": "NashMDTrainer"}
    trainer_class = getattr(module, class_names.get(module.__name__.rpartition(".")[2], "OnlineDPOTrainer"))
    if reexported := absent_if_reexported(module, trainer_class.training_step):
        return reexported
    if "num_items_in_batch" not in signature(trainer_class.training_step).parameters:
        return absent("transformers 4.46 and later cannot call it, and earlier ones have accelerate divide")
    trainer = online_dpo_stub(module, gradient_accumulation_steps=4)
    logged = float(trainer.training_step(trainer.model, {"prompt": ["a"]}, None))
    (loss,) = trainer.went_backward
    return judge(float(loss.detach()), right=logged, wrong=4 * logged)
