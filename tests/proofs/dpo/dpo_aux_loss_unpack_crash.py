"""Train a tiny Mixtral two steps of two micro-batches with the real DPOTrainer, and evaluate.

Losses and gradients are compared with the formula, with and without precomputed reference log-probs. In the releases
that have the bug, also train one step under a real DeepSpeed engine.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import judged_steps, several_runs

ID = "dpo-aux-loss-unpack-crash"
METHODS = ("get_batch_loss_metrics", "compute_reference_log_probs")
OVERLAYS = ("deepspeed",)
PARITY = True
EQUIVALENT = {
    "applied twice": "the first five of five values are the same values",
    "unpack_reference: `with _five_values(call.trainer, after=0):` -> `with _five_values(call.trainer, after= -1):`": (
        "no call has a number below 0"
    ),
}

COEFFICIENT = 0.5


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not hasattr(trl.DPOTrainer, METHODS[0]):
        return tiny.TrainingResult(absent("the methods are others since 0.29.0"))
    settings = {"plain": {}, "precomputed": {"precompute_ref_log_probs": True}}
    results = {name: _train(**changed) for name, changed in settings.items()}
    if all(isinstance(result, str) for result in results.values()):
        return tiny.TrainingResult(Outcome(Verdict.REPRODUCED, results))
    outcomes = {name: judged_steps(run) for name, run in results.items()}
    if {outcome.verdict for outcome in outcomes.values()} != {Verdict.FIXED}:
        raise AssertionError(f"the auxiliary loss is not there: {outcomes}")
    if Version(trl.__version__) < Version("0.11.0"):
        # DeepSpeed is compared with the formula only, not with 0.11.0, which drops the term under DeepSpeed.
        with_deepspeed = tiny.one_step_of_moe_dpo(deepspeed=tiny.deepspeed(stage=0)).outcome
        # It tells the next trainer of this process to use DeepSpeed too.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        if with_deepspeed.verdict is not Verdict.FIXED:
            raise AssertionError(f"under DeepSpeed: {with_deepspeed}")
    return several_runs(results, outcomes["plain"])


def unaffected() -> tiny.TrainingResult:
    """Train a dense model, with and without precomputed reference log-probs."""
    formula = dpo_steps.reference_or_policy
    runs = {
        "plain": dpo_steps.dpo_steps(formula, reference=1),
        "precomputed": dpo_steps.dpo_steps(formula, reference=1, precompute_ref_log_probs=True),
    }
    for name in METHODS:
        target = f"trl.trainer.dpo_trainer:DPOTrainer.{name}"
        assert all(tiny.acts(ID, target, run.trainer) in (None, 0) for run in runs.values())
    return several_runs(runs, absent("the model has no router"))


def _train(**settings: Any) -> tiny.FormulaSteps | str:
    """Return the run, or the error that it ends with."""
    formula = partial(dpo_steps.with_aux_loss, coefficient=COEFFICIENT)
    make = partial(tiny.mixtral, coefficient=COEFFICIENT)
    # With an adapter the reference is the policy without it.
    reference = None if tiny.variant == "lora" else 1
    try:
        return dpo_steps.dpo_steps(formula, make, reference=reference, **settings)
    except ValueError as error:
        if "too many values to unpack" not in str(error):
            raise
        return str(error)
