"""Train one step of a tiny Mixtral with the real DPOTrainer, with and without precomputed reference log-probs.

In the releases that have the bug, also train one step under a real DeepSpeed engine.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ("deepspeed",)
PARITY = True


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    results = {"plain": _train(), "precomputed": _train(precompute_ref_log_probs=True)}
    verdicts = [result.outcome.verdict for result in results.values()]
    if verdicts == [Verdict.REPRODUCED] * 2:
        return results["plain"]
    if verdicts != [Verdict.FIXED] * 2:
        raise AssertionError(f"they do not agree: {results}")
    gradients = {
        f"{run}.{name}": gradient for run, result in results.items() for name, gradient in result.gradients.items()
    }
    if Version(trl.__version__) < Version("0.11.0"):
        # DeepSpeed is compared with the formula only, not with 0.11.0, which drops the term under DeepSpeed.
        results["DeepSpeed"] = _train(deepspeed=tiny.deepspeed(stage=0))
        if results["DeepSpeed"].outcome.verdict is not Verdict.FIXED:
            raise AssertionError(f"under DeepSpeed: {results['DeepSpeed'].outcome}")
    numbers = {run: result.outcome.to_dict() for run, result in results.items()}
    return tiny.TrainingResult(Outcome(Verdict.FIXED, numbers), results["plain"].loss, gradients)


def _train(**settings: Any) -> tiny.TrainingResult:
    try:
        return tiny.one_step_of_moe_dpo(**settings)
    except ValueError as error:
        if "too many values to unpack" not in str(error):
            raise
        return tiny.TrainingResult(Outcome(Verdict.REPRODUCED, {"error": str(error)}))
