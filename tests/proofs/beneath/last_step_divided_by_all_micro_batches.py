"""Train a step of three micro-batches and the one that the epoch ends with, and evaluate.

The gradient and the logged loss of a step are the means over its micro-batches of those that the trainer computes. The
wrong ones of the last step are a third of that.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.every_trainer import Run, Step

ID = "last-step-divided-by-all-micro-batches"
OVERLAYS = ("scikit-learn",)
"""BCO does not start without it."""

PARITY = False
VARIANTS = {"lora": "the proof trains a classifier too, which is made without an adapter"}
EQUIVALENT = {"applied twice": "the second sets the same number again"}

ACCUMULATED = 3
ROWS = {"DPO": 2, "KTO": 4, "ORPO": 2, "CPO": 2, "BCO": 4, "Reward": 2}
"""The rows of a micro-batch, four of which are an epoch."""


def train() -> tiny.TrainingResult:
    import transformers

    if not in_range(transformers.__version__, ">=4.49,<4.55"):
        return tiny.TrainingResult(absent("this transformers counts the micro-batches of a step, or within its loop"))
    runs = [_run(name, ACCUMULATED) for name in ROWS]
    assert all([len(step.losses) for step in run.steps] == [ACCUMULATED, 1] for run in runs)
    outcomes = {run.name: _outcome(run) for run in runs if not _nobody_divides(run)}
    assert len({outcome.verdict for outcome in outcomes.values()}) == 1, outcomes
    outcome = next(iter(outcomes.values()))
    for run in runs:
        assert _acted(run) in (None, 1 if outcome.verdict is Verdict.FIXED else 0), run.name
    return _result(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train steps that are full, without accumulation and with it, and losses that are divided by the tokens."""
    runs = [_run(name, steps) for name in ROWS for steps in (1, 2)]
    assert not any(_acted(run) for run in runs)
    return _result(runs, absent("the micro-batches of an epoch fill its steps"))


def _run(name: str, accumulated: int) -> Run:
    return Run(name, gradient_accumulation_steps=accumulated, per_device_train_batch_size=ROWS[name])


def _nobody_divides(run: Run) -> bool:
    """Return whether each step is a sum, which ``preference-grad-accum-scaling`` repairs."""
    shares = [_share(step) for step in run.steps]
    assert shares == [ACCUMULATED, 1] or shares[0] == 1, (run.name, shares)
    return shares[0] != 1


def _outcome(run: Run) -> Outcome:
    short = run.steps[1]
    of_log = [logged * len(step.losses) / sum(step.losses) for logged, step in zip(run.logged, run.steps, strict=True)]
    assert abs(of_log[0] - 1) < 1e-3, (run.name, of_log)
    assert abs(of_log[1] - _share(short)) < 1e-3, (run.name, of_log)
    return judge(_share(short), right=1.0, wrong=round(1 / ACCUMULATED, 5))


def _share(step: Step) -> float:
    """Return how much of the mean of the micro-batches' own gradients the optimizer is given."""
    import torch

    mean = {name: sum(one[name] for one in step.of_losses) / len(step.of_losses) for name in step.accumulated}
    given, right = (torch.cat([each[name].flatten() for name in mean]) for each in (step.accumulated, mean))
    share = float(given @ right / (right @ right))
    assert float((given - share * right).abs().max()) < 1e-6
    return round(share, 5)


def _acted(run: Run) -> int | None:
    return tiny.acts(ID, f"trl.trainer.{run.name.lower()}_trainer:{run.name}Trainer.training_step", run.trainer)


def _result(runs: list[Any], outcome: Outcome) -> tiny.TrainingResult:
    gradients = {f"{number} {name}": value for number, run in enumerate(runs) for name, value in run.gradients.items()}
    return tiny.TrainingResult(outcome, sum(sum(step.losses) for run in runs for step in run.steps), gradients)
