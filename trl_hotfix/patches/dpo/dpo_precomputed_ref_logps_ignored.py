"""DPO does not use the precomputed reference log-probs that are in the batch.

``get_batch_loss_metrics`` uses ``batch["reference_chosen_logps"]`` and ``batch["reference_rejected_logps"]`` only if
also ``args.rpo_alpha is not None``, which has no bearing on them (TRL issue 1962). TRL 0.10.1 uses them if
``self.precompute_ref_log_probs or self.args.rpo_alpha is not None`` (pull request 1961). The method's second forward
pass is the reference's, so the repair answers it with the two values of the batch.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import Pair, dpo_stub, pair_batch, pair_log_probs, tiny_causal_lm


@wrapper
def use_the_reference_of_the_batch(call: Call) -> Any:
    """Answer the reference's forward pass with what was precomputed."""
    trainer, batch = call.trainer, call["batch"]
    log_probs = [batch.get(f"reference_{side}_logps") for side in ("chosen", "rejected")]
    if (
        not trainer.precompute_ref_log_probs
        or trainer.args.rpo_alpha is not None
        or any(value is None for value in log_probs)
    ):
        return call()
    forward = trainer.concatenated_forward
    # The method unpacks five values of a reference and uses the first two.
    of_reference = (*log_probs, None, None, None)
    forwards = iter((forward, lambda *args, **kwargs: of_reference))

    def policy_then_batch(*args: Any, **kwargs: Any) -> Any:
        return next(forwards)(*args, **kwargs)

    with shadowed(trainer, "concatenated_forward", policy_then_batch):
        return call()


def precomputed_reference_is_used(module: ModuleType) -> Outcome:
    """Differentiate the loss of a pair by the logit of a chosen token, 4 after 3.

    Right is the loss with the reference of the batch, wrong the one with the policy as its own reference.
    """
    import torch

    model = tiny_causal_lm()
    trainer = dpo_stub(module, model=model, ref_model=None, precompute_ref_log_probs=True)
    pairs = [Pair([1, 2], [3, 4], [5, 6], (-1.0, -3.0))]
    loss, _ = trainer.get_batch_loss_metrics(model, pair_batch(module, pairs))
    chosen, rejected = pair_log_probs(model, pairs)
    (gradient,) = torch.autograd.grad(loss, model.weight)
    by_margin = float(trainer.beta * (model.weight[3].softmax(-1)[4] - 1))
    margin = trainer.beta * float(chosen - rejected - (-1.0 + 3.0))
    return judge(float(gradient[3, 4]), right=by_margin / (1 + math.exp(margin)), wrong=by_margin / 2)
