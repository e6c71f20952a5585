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

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, micro_batches, shadowed
from ..model import Outcome, Verdict
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
    """Check the loss that ``backward`` is called with, and its gradient, in three micro-batches of two steps.

    A single micro-batch, one under DeepSpeed and one that accelerate divides keep the undivided loss.
    """
    class_names = {"xpo_trainer": "XPOTrainer", "nash_md_trainer": "NashMDTrainer"}
    trainer_class = getattr(module, class_names.get(module.__name__.rpartition(".")[2], "OnlineDPOTrainer"))
    if reexported := absent_if_reexported(module, trainer_class.training_step):
        return reexported
    if "num_items_in_batch" not in signature(trainer_class.training_step).parameters:
        return absent("transformers 4.46 and later cannot call it, and earlier ones have accelerate divide")
    # The last step of an epoch may have fewer micro-batches.
    counts = (4, 4, 2)
    undivided, divided = _run(module, (1, 1, 1)), _run(module, counts)
    outcome = judge(
        sum(divided.losses),
        right=sum(loss / count for loss, count in zip(undivided.losses, counts, strict=True)),
        wrong=sum(undivided.losses),
    )
    mistakes = []
    if outcome.verdict is Verdict.FIXED:
        for number, count in enumerate(counts):
            loss, gradient = undivided.losses[number] / count, undivided.gradients[number] / count
            measured = divided.losses[number], divided.gradients[number]
            if not math.isclose(measured[0], loss, rel_tol=1e-5) or not measured[1].allclose(gradient):
                mistakes.append(f"micro-batch {number}: {measured}, and not {(loss, gradient)}")
    under_deepspeed = _run(module, counts[:1], distributed_type="DEEPSPEED")
    divided_by_accelerate = _run(module, counts[:1], gradient_accumulation_steps=4)
    for name, run in {"one": undivided, "DeepSpeed": under_deepspeed, "accelerate": divided_by_accelerate}.items():
        if run.losses != undivided.losses[: len(run.losses)] or run.replaced:
            mistakes.append(f"{name}: divided twice, {run.losses}, and undivided {undivided.losses}")
    for run in (divided, under_deepspeed):
        if run.returned != [loss / 4 for loss in undivided.losses[: len(run.losses)]]:
            mistakes.append(f"the logged losses are {run.returned}")
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return outcome


@dataclass
class _Run:
    """What ``backward`` was called with in each micro-batch, and whether it was TRL's own ``backward``."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    replaced: bool = False


def _run(module: ModuleType, counts: tuple[int, ...], **accelerator_attributes: Any) -> _Run:
    """Run a micro-batch for each of ``counts``, the micro-batches of its step. Before the second is an evaluation."""
    import torch

    run = _Run()
    trainer = online_dpo_stub(module, gradient_accumulation_steps=max(counts))

    def backward(loss: Any) -> None:
        run.replaced = run.replaced or trainer.accelerator.backward is not backward
        run.losses.append(float(loss.detach()))
        run.gradients.append(torch.autograd.grad(loss, trainer.model.weight)[0])

    vars(trainer.accelerator).update(backward=backward, **accelerator_attributes)
    for number, count in enumerate(counts):
        trainer.current_gradient_accumulation_steps = count
        trainer.state.global_step = number // 2
        trainer.model.train(number != 1)
        run.returned.append(float(trainer.training_step(trainer.model, {"prompt": ["a"]}, None)))
        with torch.no_grad():
            # The next loss is another one.
            trainer.model.weight.mul_(1.5)
    return run
