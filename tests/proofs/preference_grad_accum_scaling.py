"""Train two optimizer steps of two micro-batches with the real trainers of DPO, KTO, CPO and BCO, and evaluate.

The accumulated gradient of a step is compared with the mean of the gradients of its micro-batches' losses, and with
their sum. The losses of DPO are compared with the formula of the paper (arXiv:2305.18290, equation 7) too.
"""

from __future__ import annotations

from trl_hotfix.model import Verdict

import tiny
from tiny import accumulation, dpo_steps

ID = "preference-grad-accum-scaling"
OVERLAYS = ("scikit-learn",)
"""BCO does not start without it."""

PARITY = True
EQUIVALENT = {"applied twice": "the second wrapper finds that transformers divides"}


def methods() -> list[str]:
    """Return the methods whose trainer this release has; BCO is gone in the newest."""
    return [method for method in ("DPO", "KTO", "CPO", "BCO") if tiny.classes(method)[0] is not None]


def train() -> tiny.TrainingResult:
    result = accumulation.accumulated_steps(methods())
    if result.outcome.verdict is not Verdict.ABSENT:
        # With an adapter the reference is the model without it.
        reference = None if tiny.state.variant == "lora" else 1
        dpo_steps.assert_right(dpo_steps.dpo_steps(dpo_steps.reference_or_policy, reference=reference))
    return result


def unaffected() -> tiny.TrainingResult:
    return accumulation.unaffected_steps(ID, methods())
