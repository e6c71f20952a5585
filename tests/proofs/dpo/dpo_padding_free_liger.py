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
from tiny import dpo_steps, liger
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
    trainer.dpo_loss_fn = functools.partial(liger.dpo_loss, trainer.beta)
