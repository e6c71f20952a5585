"""Train two steps of two micro-batches, and evaluate, with the real DPOTrainer, the Liger loss and padding_free.

Losses and gradients are compared with the formula. Liger is an optional package that the stacks lack. The formula that
it fuses replaces it, on the rows that it would take for the chosen and for the rejected ones.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import several_runs

OVERLAYS = ()
PARITY = False
VARIANTS = {
    "compiled": "TRL's Liger loss calls the decoder of the model that is not compiled.",
    "lora": "TRL's Liger loss asks the model for its decoder: a TypeError with an adapter, patched or not.",
}


def train() -> tiny.TrainingResult:
    import trl

    if not all(hasattr(trl.DPOTrainer, name) for name in ("_compute_loss_liger", "concatenated_forward")):
        return tiny.TrainingResult(absent("the Liger loss is given no flattened batch"))
    run = steps(padding_free=True)
    losses = [micro_batch.loss for micro_batch in run.micro_batches]
    numbers = sum(math.isfinite(loss) for loss in losses)
    outcome = judge(float(numbers), right=float(len(losses)), wrong=0.0)
    if outcome.verdict is Verdict.FIXED:
        dpo_steps.assert_right(run)
    result = run.result
    return tiny.TrainingResult(outcome, None if math.isnan(losses[0]) else losses[0], result.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without padding_free."""
    run = steps()
    dpo_steps.assert_right(run)
    return several_runs({"padded": run}, absent("every sequence has a row"))


def steps(**settings: Any) -> tiny.FormulaSteps:
    return dpo_steps.dpo_steps(dpo_steps.reference_or_policy, reference=1, prepare=use_liger, **settings)


def use_liger(trainer: Any) -> None:
    # Older and newer releases name this argument differently.
    trainer.args.use_liger_loss = trainer.args.use_liger_kernel = True
    trainer.dpo_loss_fn = functools.partial(fused, trainer.beta)


def fused(beta: float, weight: Any, hidden: Any, labels: Any, **reference: Any) -> Any:
    """Return what ``LigerFusedLinearDPOLoss`` (liger-kernel 0.6.4) returns."""
    import torch

    def log_probs(hidden: Any, weight: Any) -> tuple[Any, Any]:
        logits = hidden @ weight.t()
        mask = labels != -100
        token_log_probs = logits.log_softmax(-1).gather(-1, labels.masked_fill(~mask, 0)[..., None])[..., 0]
        return (token_log_probs * mask).sum(-1), logits

    chosen = len(labels) // 2
    policy, logits = log_probs(hidden, weight)
    with torch.no_grad():
        reference_log_probs, _ = log_probs(reference["ref_input"], reference["ref_weight"])
    rewards = beta * (policy - reference_log_probs)
    loss = -torch.nn.functional.logsigmoid(rewards[:chosen] - rewards[chosen:]).mean()
    means = (logits[:chosen].mean(), logits[chosen:].mean())
    rewards = rewards.detach()
    return loss, (policy[:chosen], policy[chosen:], *means, torch.zeros(()), rewards[:chosen], rewards[chosen:])
