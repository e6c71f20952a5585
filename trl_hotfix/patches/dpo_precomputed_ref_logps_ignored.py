"""DPO does not use the precomputed reference log-probs that are in the batch.

``get_batch_loss_metrics`` uses ``batch["reference_chosen_logps"]`` and ``batch["reference_rejected_logps"]`` only if
also ``args.rpo_alpha is not None``, which has no bearing on them (TRL issue 1962). TRL 0.10.1 uses them if
``self.precompute_ref_log_probs or self.args.rpo_alpha is not None`` (pull request 1961). The method's second forward
pass is that of the reference, so the repair answers it with the two values of the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import Call, shadowed, wrapper
from ..model import Outcome, Verdict
from ..testing import (
    dpo_stub,
    judge_with_gradients,
    pair_batch,
    pair_log_probs,
    pair_loss,
    pair_micro_batches,
    tiny_causal_lm,
)


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
    """Compute the loss of two steps and of an evaluation, of pairs whose reference is not the policy.

    Right is the loss with the reference of the batch. Wrong is that with the policy as its own reference, log 2.
    """
    model = tiny_causal_lm()
    trainers = [
        dpo_stub(module, model=model, ref_model=None, precompute_ref_log_probs=True, state=SimpleNamespace())
        for _ in range(2)
    ]
    outcome = judge_with_gradients([model.weight], _losses(module, *trainers))
    own_code = inspect.unwrap(module.DPOTrainer.get_batch_loss_metrics).__code__
    # From 0.12 on any reference in the batch is used.
    if outcome.verdict is Verdict.FIXED and "reference_chosen_logps" in own_code.co_consts:
        _check_other_batches(module, trainers[0])
    return outcome


def _losses(module: ModuleType, training: Any, evaluating: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Give the loss of each micro-batch as it is measured, right and wrong. One trainer trains, another evaluates."""
    import torch

    for micro_batch in pair_micro_batches():
        trainer = training if micro_batch.is_training else evaluating
        trainer.state.global_step = micro_batch.step
        trainer.model.train(micro_batch.is_training)
        batch = pair_batch(module, micro_batch.pairs)
        mode = "train" if micro_batch.is_training else "eval"
        measured, _ = trainer.get_batch_loss_metrics(trainer.model, batch, train_eval=mode)
        policy = pair_log_probs(trainer.model, micro_batch.pairs)
        chosen, rejected = torch.tensor([pair.reference for pair in micro_batch.pairs]).T
        right = pair_loss(trainer.args.beta, policy, (chosen, rejected))
        yield measured, right, pair_loss(trainer.args.beta, policy, (policy[0].detach(), policy[1].detach()))


def _check_other_batches(module: ModuleType, trainer: Any) -> None:
    """Check that the reference is computed where nothing was precomputed, and where the batch has half of it."""
    pairs = next(pair_micro_batches()).pairs
    for missing in ("", "reference_chosen_logps", "reference_rejected_logps"):
        trainer.precompute_ref_log_probs = bool(missing)
        batch = pair_batch(module, pairs)
        batch.pop(missing, None)
        loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch)
        if abs(float(loss.detach()) - math.log(2)) > 1e-6:
            raise AssertionError(f"the loss is {loss}, and not log 2, without {missing or 'a precomputed reference'}")
