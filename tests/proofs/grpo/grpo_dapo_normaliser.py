"""Train two optimizer steps of two micro-batches, of four that were generated together, with the real GRPOTrainer.

Losses and accumulated gradients are compared with DAPO (arXiv:2503.14476, equation 8). In the second step the policy is
not any more the one that generated.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = True

GENERATED, ACCUMULATED = 4, 2


def train() -> tiny.TrainingResult:
    try:
        run = _run(GENERATED, "dapo")
    except ValueError as error:
        if "Unknown loss type: dapo" not in str(error):
            raise
        return tiny.TrainingResult(absent("this release has no dapo loss"))
    evaluations = [micro_batch for micro_batch in run.micro_batches if not micro_batch.is_training]
    if len(evaluations) != 2:
        raise AssertionError(f"expected two micro-batches of the evaluation: {evaluations}")
    result = run.result
    result.outcome = grpo_steps.judged_steps(run)
    return result


def unaffected() -> tiny.TrainingResult:
    """Train on all that is generated in each step, and with a loss that is divided by no token count."""
    runs = {"all": _run(ACCUMULATED, "dapo"), "bnpo": _run(GENERATED, "bnpo")}
    return grpo_steps.several_runs(runs, absent("the count is right, or there is none"))


def _run(generated: int, loss_type: str) -> tiny.FormulaSteps:
    def formula(trainer: Any, inputs: Any, token_loss: Any, mask: Any) -> dict[str, Any]:
        tokens = float(inputs["num_items_in_batch"])
        total = (token_loss * mask).sum()
        # An evaluation generates what it evaluates, and accumulates nothing.
        share = ACCUMULATED / generated if trainer.model.training else 1
        return {"right": total / (tokens * share), "wrong": total / tokens}

    settings = {"loss_type": loss_type, "beta": 0.0, "steps_per_generation": generated}
    return grpo_steps.grpo_steps(formula, moved=0.1, gradient_accumulation_steps=ACCUMULATED, **settings)
