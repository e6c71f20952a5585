"""SFT adds the router auxiliary loss of a mixture-of-experts model a second time.

A model with ``output_router_logits=True`` that is given labels returns ``cross_entropy + router_aux_loss_coef *
aux_loss`` as its loss. TRL 0.23.0 (pull request 4012) adds ``aux_loss_coef * outputs.aux_loss`` to it again. If the
coefficient is 0, it logs a variable that it has not set, hence the ``UnboundLocalError``. TRL 0.23.1 (pull request
4078) leaves the loss alone and logs ``outputs.aux_loss``; the wrapper does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import act, argument, judge, replaced_argument
from ..model import Outcome, Verdict
from ..testing import sft_moe_loss


def count_aux_loss_once(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``compute_loss`` without its own term, and log the auxiliary loss as 0.23.1 does."""
    # In both cases the model is given no labels, so TRL's term is the only one.
    loss_without_labels = instance.compute_loss_func is not None or instance.label_smoother is not None
    if not instance.aux_loss_enabled or (instance.aux_loss_coef and loss_without_labels):
        return wrapped(*args, **kwargs)
    with_outputs = argument(wrapped, args, kwargs, "return_outputs")
    args, kwargs = replaced_argument(wrapped, args, kwargs, "return_outputs", True)
    act()
    instance.aux_loss_enabled = False
    try:
        loss, outputs = wrapped(*args, **kwargs)
    finally:
        instance.aux_loss_enabled = True
    if not instance.args.use_liger_kernel:
        mode = "train" if instance.model.training else "eval"
        logged = instance.accelerator.gather_for_metrics(outputs.aux_loss).mean().item()
        instance._metrics[mode]["aux_loss"].append(logged)
    return (loss, outputs) if with_outputs else loss


def aux_loss_is_counted_once(module: ModuleType) -> Outcome:
    """Check that the loss of a model that adds coefficient * aux_loss itself is the loss that it returned."""
    cross_entropy, aux_loss = 3.0, 2.0

    def loss_with(coefficient: float) -> float:
        return sft_moe_loss(module, coefficient, cross_entropy=cross_entropy, aux_loss=aux_loss)

    coefficient = 0.5
    model_loss = cross_entropy + coefficient * aux_loss
    outcome = judge(
        loss_with(coefficient),
        right=model_loss,
        wrong=model_loss + coefficient * aux_loss,
        coefficient=coefficient,
        aux_loss=aux_loss,
    )
    if outcome.verdict is Verdict.FIXED and loss_with(0.0) != cross_entropy:
        raise AssertionError("with a coefficient of 0 the loss is not the cross-entropy")
    return outcome
