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

from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, micro_batches, shadowed
from ..model import Outcome
from ..testing import absent_if_reexported, online_dpo_stub


def take_the_mean_of_the_micro_batches(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the step with an ``accelerator.backward`` that divides the loss by the micro-batches of this step."""
    accelerator, steps = instance.accelerator, micro_batches(instance)
    already_divided = accelerator.distributed_type == "DEEPSPEED" or accelerator.gradient_accumulation_steps != 1
    if steps == 1 or already_divided:
        return wrapped(*args, **kwargs)
    backward = accelerator.backward

    def backward_of_share(loss: Any, **options: Any) -> Any:
        return backward(loss / steps, **options)

    with shadowed(accelerator, "backward", backward_of_share):
        return wrapped(*args, **kwargs)


def gradient_is_the_mean_of_the_micro_batches(module: ModuleType) -> Outcome:
    """Check that ``backward`` is called with a quarter of the loss of one of four micro-batches.

    A single micro-batch and one under DeepSpeed keep the undivided loss.
    """

    def loss_of(steps: int, **accelerator_attributes: Any) -> float:
        trainer = online_dpo_stub(module, gradient_accumulation_steps=steps)
        trainer.current_gradient_accumulation_steps = steps
        vars(trainer.accelerator).update(accelerator_attributes)
        trainer.training_step(trainer.model, {"prompt": ["a"]}, None)
        (loss,) = trainer.went_backward
        return float(loss.detach())

    class_names = {"xpo_trainer": "XPOTrainer", "nash_md_trainer": "NashMDTrainer"}
    trainer_class = getattr(module, class_names.get(module.__name__.rpartition(".")[2], "OnlineDPOTrainer"))
    if reexported := absent_if_reexported(module, trainer_class.training_step):
        return reexported
    if "num_items_in_batch" not in signature(trainer_class.training_step).parameters:
        return absent("transformers 4.46 and later cannot call it, and earlier ones have accelerate divide")
    undivided = loss_of(1)
    outcome = judge(loss_of(4), right=undivided / 4, wrong=undivided)
    under_deepspeed = loss_of(4, distributed_type="DEEPSPEED")
    divided_by_accelerate = loss_of(4, gradient_accumulation_steps=4)
    if not under_deepspeed == divided_by_accelerate == undivided:
        raise AssertionError(
            f"divided twice: {under_deepspeed} under DeepSpeed, {divided_by_accelerate} by accelerate, "
            f"{undivided} undivided"
        )
    return outcome
