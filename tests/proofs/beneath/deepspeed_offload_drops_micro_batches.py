"""Train two steps of four micro-batches with a real engine of DeepSpeed: how do the weights move?

Each step of SGD moves them by the sum of the gradients that come to the parameters, micro-batch by micro-batch.
"""

from __future__ import annotations

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.deepspeed_runs import DeepSpeedStep, acts, deepspeed_run, largest_difference, length, result_of

ID = "deepspeed-offload-drops-micro-batches"
OVERLAYS = ()
PARITY = False
VARIANTS = "the gradients are summed up by DeepSpeed, whatever model they are of"

MICRO_BATCHES = 4
METHODS = ("SFT", "DPO", "CPO")
"""From 0.18.0 on SFT has a step of its own, DPO from 0.29.0 on; that of CPO is transformers'."""


def train() -> tiny.TrainingResult:
    runs = {method: deepspeed_run(method, micro_batches=MICRO_BATCHES, stage=2, offloads=True) for method in METHODS}
    outcomes = [_judged(step) for run in runs.values() for step in run.steps]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the steps do not agree: {outcomes}")
    for method, run in runs.items():
        # The first micro-batch is copied by DeepSpeed, the last goes on to the optimizer.
        assert acts(ID, run) in (None, len(run.steps) * (MICRO_BATCHES - 2)), (method, acts(ID, run))
    return result_of(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train on two micro-batches, without offloading, and with ZeRO-1, which adds micro-batches up on its own."""
    runs = {
        "two": deepspeed_run("SFT", micro_batches=2, stage=2, offloads=True),
        "not offloaded": deepspeed_run("SFT", micro_batches=MICRO_BATCHES, stage=2),
        "stage 1": deepspeed_run("SFT", micro_batches=MICRO_BATCHES, stage=1, offloads=True),
    }
    for name, run in runs.items():
        assert not acts(ID, run), name
        for step in run.steps:
            assert largest_difference(step.moved, step.sum_of()) < 1e-6, name
    return result_of(runs, absent("no micro-batch is dropped"))


def _judged(step: DeepSpeedStep) -> Outcome:
    """Judge how the weights have moved. Dropped are all micro-batches but the first and the last."""
    right, wrong = step.sum_of(), step.sum_of(0, -1)
    outcome = judge(length(step.moved), right=length(right), wrong=length(wrong))
    expected = right if outcome.verdict is Verdict.FIXED else wrong
    assert largest_difference(step.moved, expected) < 1e-6, largest_difference(step.moved, expected)
    return outcome
