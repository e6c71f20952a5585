"""SFT adds the router auxiliary loss of a mixture-of-experts model a second time.

A model with ``output_router_logits=True`` that is given labels returns ``cross_entropy + router_aux_loss_coef *
aux_loss`` as its loss. TRL 0.23.0 (pull request 4012) adds ``aux_loss_coef * outputs.aux_loss`` to it again. If the
coefficient is 0, it logs a variable that it has not set, hence the ``UnboundLocalError``. TRL 0.23.1 (pull request
4078) leaves the loss alone and logs ``outputs.aux_loss``; the wrapper does the same.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome, Verdict
from ...testing import SftMoeStep


@wrapper
def count_aux_loss_once(call: Call) -> Any:
    """Call ``compute_loss`` without its own term, and log the auxiliary loss as 0.23.1 does."""
    trainer = call.trainer
    # In both cases the model is given no labels, so TRL's term is the only one.
    loss_without_labels = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    if not trainer.aux_loss_enabled or (trainer.aux_loss_coef and loss_without_labels):
        return call()
    with_outputs = call["return_outputs"]
    call.act()
    trainer.aux_loss_enabled = False
    try:
        loss, outputs = call.with_(return_outputs=True)()
    finally:
        trainer.aux_loss_enabled = True
    if not trainer.args.use_liger_kernel:
        mode = "train" if call.is_training else "eval"
        logged = trainer.accelerator.gather_for_metrics(outputs.aux_loss).mean().item()
        trainer._metrics[mode]["aux_loss"].append(logged)
    return (loss, outputs) if with_outputs else loss


def aux_loss_is_counted_once(module: ModuleType) -> Outcome:
    """Check by derivatives that the auxiliary loss has the weight that the model gives it, and that it is logged."""
    import torch

    coefficient = 0.5
    step = SftMoeStep(module, coefficient, model_accepts_loss_kwargs=False)
    trainer, model = step.trainer, step.model
    _, weight = step.weights(items=None)
    outcome = judge(weight, right=coefficient, wrong=2 * coefficient)
    adds_again = "aux_loss_coef" in inspect.unwrap(module.SFTTrainer.compute_loss).__code__.co_names
    if outcome.verdict is Verdict.REPRODUCED or not adds_again:
        return outcome

    def by_cross_entropy(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return outputs.cross_entropy

    def of_both_ranks(value: Any) -> Any:
        return torch.stack([value, value + 2])

    def step_with(*shadows: tuple[Any, str, Any]) -> tuple[float, list[float]]:
        """Return the weight of the auxiliary loss in one more step, and what is logged of it."""
        trainer._metrics.clear()
        with ExitStack() as stack:
            for shadow in shadows:
                stack.enter_context(shadowed(*shadow))
            weight = step.weights(items=None)[1]
        if not trainer.aux_loss_enabled or step.outputs is not None:
            raise AssertionError("the trainer is another one after the call, or returns outputs that nobody asked for")
        mode = "train" if model.training else "eval"
        return weight, getattr(trainer._metrics[mode]["aux_loss"], "entries", [])

    zero = (trainer, "aux_loss_coef", 0.0), (model, "router_aux_loss_coef", 0.0)
    own_loss = trainer, "compute_loss_func", by_cross_entropy
    smoothed = trainer, "label_smoother", by_cross_entropy
    steps = {
        "again": (step_with(), (coefficient, [2.0])),
        "a coefficient of 0": (step_with(*zero), (0.0, [2.0])),
        "a loss of the user's": (step_with(own_loss), (coefficient, [coefficient * 2.0])),
        "a loss of the user's, a coefficient of 0": (step_with(own_loss, *zero), (0.0, [2.0])),
        "label smoothing": (
            step_with(smoothed),
            (coefficient, [coefficient * 2.0]),
        ),
        "Liger": (step_with((trainer.args, "use_liger_kernel", True)), (coefficient, [])),
        "two ranks": (step_with((trainer.accelerator, "gather_for_metrics", of_both_ranks)), (coefficient, [3.0])),
    }
    model.eval()
    steps["evaluation"] = step_with(), (coefficient, [2.0])
    wrong = {name: measured for name, (measured, right) in steps.items() if measured != right}
    if wrong:
        raise AssertionError(f"wrong weight or log of the auxiliary loss: {wrong}")
    if step.weights(items=None, return_outputs=True)[1] != coefficient or step.outputs is None:
        raise AssertionError("the outputs are not returned")
    _check_untouched(step)
    return outcome


def _check_untouched(step: SftMoeStep) -> None:
    """Check a trainer that adds nothing, and one whose model fails."""
    trainer = step.trainer
    with shadowed(trainer, "aux_loss_enabled", False):
        trainer._metrics.clear()
        _, weight = step.weights(items=None)
        if weight != 0.5 or hasattr(trainer._metrics["eval"]["aux_loss"], "entries") or trainer.aux_loss_enabled:
            raise AssertionError(f"without the term the auxiliary loss has the weight {weight}, or is logged")
    with suppress(ZeroDivisionError), shadowed(step, "coefficient", lambda: 1 / 0):
        step.weights(items=None)
    if not trainer.aux_loss_enabled:
        raise AssertionError("after an error the term is off")
