"""Online DPO, XPO and Nash-MD add up the gradients of the micro-batches, where they should take the mean.

The three have a ``training_step`` of their own. It hands the loss to ``accelerator.backward`` as it is, and divides by
``gradient_accumulation_steps`` only what it returns, which is what is logged. Up to transformers 4.45 accelerate did
the division; since 4.46 ``Trainer`` tells it nothing of the accumulation ("We explicitly don't rely on the
`Accelerator` to do gradient accumulation") and divides in its own ``training_step``, which is not called here. The
gradient is then ``gradient_accumulation_steps`` times too large: Adam hardly notices, but ``max_grad_norm`` clips
nearly every step, the ``grad_norm`` in the logs is not that of the logged loss, and SGD or Lion take other steps.

``accelerator.backward`` is given the mean's share, ``loss / micro-batches of this step``, as in ``Trainer``. Where
somebody divides already nothing is done: a DeepSpeed engine, whose ``backward`` does, and an accelerator that was told
of the accumulation (``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``). Apex does not come by here, nor is its loss divided in
``Trainer``.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, micro_batches, shadowed
from ..model import Outcome
from ..stubs import absent_if_reexported, online_dpo_stub


def take_the_mean_of_the_micro_batches(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the step with an ``accelerator.backward`` that divides the loss by the micro-batches of this step."""
    accelerator, steps = instance.accelerator, micro_batches(instance)
    divided = accelerator.distributed_type == "DEEPSPEED" or accelerator.gradient_accumulation_steps != 1
    if steps == 1 or divided:
        return wrapped(*args, **kwargs)
    backward = accelerator.backward

    def backward_of_share(loss: Any, **options: Any) -> Any:
        return backward(loss / steps, **options)

    with shadowed(accelerator, "backward", backward_of_share):
        return wrapped(*args, **kwargs)


def gradient_is_the_mean_of_the_micro_batches(module: ModuleType) -> Outcome:
    """One of four micro-batches goes backward with a quarter of its loss; with all of it under DeepSpeed, or alone."""

    def loss_of(steps: int, **of_accelerator: Any) -> float:
        trainer = online_dpo_stub(module, gradient_accumulation_steps=steps)
        trainer.current_gradient_accumulation_steps = steps
        vars(trainer.accelerator).update(of_accelerator)
        trainer.training_step(trainer.model, {"prompt": ["a"]}, None)
        (loss,) = trainer.went_backward
        return float(loss.detach())

    name = {"xpo_trainer": "XPOTrainer", "nash_md_trainer": "NashMDTrainer"}
    trainer_class = getattr(module, name.get(module.__name__.rpartition(".")[2], "OnlineDPOTrainer"))
    if elsewhere := absent_if_reexported(module, trainer_class.training_step):
        return elsewhere
    if "num_items_in_batch" not in signature(trainer_class.training_step).parameters:
        return absent("transformers 4.46 and later cannot call it, and earlier ones have accelerate divide")
    alone = loss_of(1)
    outcome = judge(loss_of(4), right=alone / 4, wrong=alone)
    engine, told = loss_of(4, distributed_type="DEEPSPEED"), loss_of(4, gradient_accumulation_steps=4)
    if not engine == told == alone:
        raise AssertionError(f"divided twice: {engine} under DeepSpeed, {told} by accelerate, {alone} undivided")
    return outcome
