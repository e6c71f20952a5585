"""The proof: one step of a tiny Mixtral with the real DPOTrainer: as it is, with precomputed reference log-probs, and,
in the releases that have the bug, under a real DeepSpeed engine."""

from __future__ import annotations

from typing import Any

from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ("deepspeed",)
PARITY = True


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    seen = {"plain": _train(), "precomputed": _train(precompute_ref_log_probs=True)}
    verdicts = [each.outcome.verdict for each in seen.values()]
    if verdicts == [Verdict.REPRODUCED] * 2:
        return seen["plain"]
    if verdicts != [Verdict.FIXED] * 2:
        raise AssertionError(f"they do not agree: {seen}")
    gradients = {f"{run}.{name}": each for run, it in seen.items() for name, each in it.gradients.items()}
    if Version(trl.__version__) < Version("0.11.0"):
        # Compared with the formula only: 0.11.0 has lost the term there.
        seen["DeepSpeed"] = _train(deepspeed=tiny.deepspeed(stage=0))
        if seen["DeepSpeed"].outcome.verdict is not Verdict.FIXED:
            raise AssertionError(f"under DeepSpeed: {seen['DeepSpeed'].outcome}")
    numbers = {run: each.outcome.to_dict() for run, each in seen.items()}
    return tiny.TrainingResult(Outcome(Verdict.FIXED, numbers), seen["plain"].loss, gradients)


def _train(**settings: Any) -> tiny.TrainingResult:
    try:
        return tiny.one_step_of_moe_dpo(**settings)
    except ValueError as error:
        if "too many values to unpack" not in str(error):
            raise
        return tiny.TrainingResult(Outcome(Verdict.REPRODUCED, {"error": str(error)}))
