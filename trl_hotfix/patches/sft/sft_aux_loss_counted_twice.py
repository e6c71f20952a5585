"""SFT adds the router auxiliary loss of a mixture-of-experts model a second time.

A model with ``output_router_logits=True`` that is given labels returns ``cross_entropy + router_aux_loss_coef *
aux_loss`` as its loss. TRL 0.23.0 (pull request 4012) adds ``aux_loss_coef * outputs.aux_loss`` to it again. If the
coefficient is 0, it logs a variable that it has not set, hence the ``UnboundLocalError``. TRL 0.23.1 (pull request
4078) leaves the loss alone and logs ``outputs.aux_loss``; the wrapper does the same.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome
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
    """Differentiate the loss by the auxiliary loss: it has the weight that the model gives it, or twice that."""
    coefficient = 0.5
    _, weight = SftMoeStep(module, coefficient, model_accepts_loss_kwargs=False).weights(items=None)
    return judge(weight, right=coefficient, wrong=2 * coefficient)
