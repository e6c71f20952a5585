"""Train two steps of four micro-batches with a real engine of DeepSpeed 0.18.3: how do the weights move?

Each step of SGD moves them by the sum of the gradients of the micro-batches, which are those of the loss of the plain
model, divided as it goes backward.
"""

from __future__ import annotations

from trl_hotfix.authoring import absent, deepspeed_divides, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.deepspeed_runs import DeepSpeedStep, acts, deepspeed_run, largest_difference, length, result_of

ID = "deepspeed-divides-by-accumulation-twice"
OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "divide_if_told: `return engine_backward(*args, **options)` detached": "accelerate takes nothing from backward",
    "applied twice": "both read the same argument of the same call",
}
VARIANTS = "the gradients are divided by DeepSpeed, whatever model they are of"

MICRO_BATCHES = 4
STAGES = {"SFT": 1, "DPO": 2, "CPO": 0}
"""Each method with a stage of ZeRO."""


def train() -> tiny.TrainingResult:
    runs = {
        method: deepspeed_run(method, micro_batches=MICRO_BATCHES, stage=stage, plain=True)
        for method, stage in STAGES.items()
    }
    if deepspeed_divides():
        return result_of(runs, absent("this transformers has DeepSpeed divide"))
    outcomes = [_judged(step) for run in runs.values() for step in run.steps]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the steps do not agree: {outcomes}")
    for method, run in runs.items():
        assert acts(ID, run) in (None, len(run.steps) * MICRO_BATCHES), (method, acts(ID, run))
    return result_of(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train without accumulation."""
    runs = {method: deepspeed_run(method, micro_batches=1, stage=stage, plain=True) for method, stage in STAGES.items()}
    for method, run in runs.items():
        assert not acts(ID, run), method
        for step in run.steps:
            assert largest_difference(step.moved, step.sum_of()) < 1e-6, method
    return result_of(runs, absent("a step has one micro-batch"))


def _judged(step: DeepSpeedStep) -> Outcome:
    """Judge how the weights have moved: by all gradients, or by those that were divided at least once.

    DeepSpeed divides at each output of the model that a gradient goes through: the loss, the logits, hidden states. So
    it divides a gradient by a power of the micro-batches, and another weight's by another power.
    """
    right = step.sum_of()
    if all(float(step.moved[name].norm()) <= 1.001 * float(right[name].norm()) / MICRO_BATCHES for name in right):
        outcome = judge(length(step.moved), right=length(right), wrong=length(step.moved))
    else:
        outcome = judge(length(step.moved), right=length(right), wrong=length(right) / MICRO_BATCHES)
    if outcome.verdict is Verdict.FIXED:
        assert largest_difference(step.moved, right) < 1e-6, largest_difference(step.moved, right)
    return outcome
