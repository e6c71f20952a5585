"""Train two optimizer steps of two micro-batches with the real trainers of DPO, KTO, CPO, BCO and ORPO, and evaluate.

The accumulated gradient of a step is compared with the mean of the gradients of its micro-batches' losses, and with
their sum. The losses of DPO are compared with the formula of the paper (arXiv:2305.18290, equation 7) too.
"""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from trl_hotfix.model import Verdict

import tiny
from tiny import accumulation, dpo_steps

ID = "preference-grad-accum-scaling"
OVERLAYS = ("scikit-learn",)
"""BCO does not start without it."""

METHODS = ["DPO", "KTO", "CPO", "BCO", "ORPO"]
PARITY = True


def methods() -> list[str]:
    """Return the methods that have the bug in some release up to this one. From 0.14 on ORPO alone has it.

    It comes last: its loss is compared with that of the first fixed release, as are its gradients.
    """
    with_bug = METHODS if Version(version("trl")) < Version("0.14.0") else METHODS[-1:]
    return [method for method in with_bug if tiny.classes(method)[0] is not None]


def train() -> tiny.TrainingResult:
    result = accumulation.accumulated_steps(methods())
    if result.outcome.verdict is not Verdict.ABSENT and "DPO" in methods():
        # With an adapter the reference is the model without it.
        reference = None if tiny.state.variant == "lora" else 1
        dpo_steps.assert_right(dpo_steps.dpo_steps(dpo_steps.reference_or_policy, reference=reference))
    return result


def unaffected() -> tiny.TrainingResult:
    return accumulation.unaffected_steps(ID, methods())
