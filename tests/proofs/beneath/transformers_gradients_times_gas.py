"""Train two optimizer steps of two unequal micro-batches with every trainer whose step is transformers', and evaluate.

The accumulated gradient of a step is compared with the mean of the gradients of its micro-batches' losses, and with
their sum; those of DPO come from the formula of the paper (arXiv:2305.18290, equation 7). What is logged is the mean.
"""

from __future__ import annotations

import os
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny import dpo_steps, every_trainer
from tiny.every_trainer import Run, Step

ID = "transformers-gradients-times-gas"
OVERLAYS = ("scikit-learn",)
"""BCO does not start without it."""

PARITY = False

WITHOUT_KEYWORDS = ("SFT", "GKD")
"""Their loss is divided by tokens if the forward of the model takes ``**kwargs``, so they train a GPT-Neo."""


def train() -> tiny.TrainingResult:
    import transformers

    if not in_range(transformers.__version__, ">=4.46.0,<4.48"):
        return tiny.TrainingResult(absent("accelerate divides, or transformers before the loss goes backward"))
    runs = [run_of(name) for name in names()]
    outcomes = [judged(run) for run in runs]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers do not agree: {dict(zip(names(), outcomes, strict=True))}")
    for run in runs:
        calls = [loss for step in run.steps for loss in step.losses]
        acted = tiny.acts(ID, target(run), run.trainer)
        assert acted in (None, len(calls)), f"{run.name}: the wrapper acts in {acted} of {len(calls)} micro-batches"
    return result(runs, outcomes[0])


def names() -> list[str]:
    """Return the trainers that this release has."""
    return [name for name in every_trainer.NAMES if tiny.classes(name)[0] is not None]


def run_of(name: str, **settings: Any) -> Run:
    if name in WITHOUT_KEYWORDS:
        return Run(name, tiny.gpt_neo, **settings)
    if name == "DPO":
        return Run(name, formula=dpo_loss, beta=dpo_steps.BETA, **settings)
    return Run(name, **settings)


def dpo_loss(policy: Any, reference: Any, batch: Any) -> Any:
    of_policy = tiny.preference_log_probs(policy, batch, differentiable=True)
    return dpo_steps.sigmoid_loss(of_policy, tiny.preference_log_probs(reference, batch))


def target(run: Run) -> str:
    """Return the method that the run calls: GKD's calls SFT's."""
    name = "SFT" if run.name == "GKD" else run.name
    return f"trl.trainer.{name.lower()}_trainer:{name}Trainer.training_step"


def judged(run: Run) -> Outcome:
    """Judge the gradients of both steps, projected on fixed numbers. They are of one kind."""
    outcomes = [judged_step(step, run.trainer.args.gradient_accumulation_steps) for step in run.steps]
    if len(outcomes) != 2 or outcomes[0].verdict is not outcomes[1].verdict:
        raise AssertionError(f"{run.name}: expected two steps of one kind: {outcomes}")
    means = [sum(step.losses) / len(step.losses) for step in run.steps]
    # 4.46.1 and 4.47.1 log a wrong loss, too.
    is_fixed = outcomes[0].verdict is Verdict.FIXED
    if is_fixed and any(abs(logged - mean) > 1e-3 for logged, mean in zip(run.logged, means, strict=True)):
        raise AssertionError(f"{run.name}: the means {means} are logged as {run.logged}")
    evaluated = sum(run.evaluated) / max(len(run.evaluated), 1)
    if run.evaluated and abs(run.evaluation - evaluated) > 1e-5:
        raise AssertionError(f"{run.name}: the evaluation says {run.evaluation}, and computes {run.evaluated}")
    return outcomes[0]


def judged_step(step: Step, accumulated: int) -> Outcome:
    import torch

    def projected(gradients: dict[str, Any]) -> float:
        flat = torch.cat([value.flatten() for _, value in sorted(gradients.items()) if value is not None])
        return float((flat * torch.cos(torch.arange(len(flat)))).sum())

    first, *others = (projected(gradients) for gradients in step.of_losses)
    if len(step.losses) != accumulated or first in others:
        raise AssertionError(f"expected {accumulated} micro-batches, no two of them equal: {step.losses}")
    total = first + sum(others)
    return judge(projected(step.accumulated), right=total / accumulated, wrong=total)


def unaffected() -> tiny.TrainingResult:
    """Train without accumulation, a model whose loss is divided by tokens, and where somebody else divides."""
    runs = [run_of(name, gradient_accumulation_steps=1) for name in names()]
    runs.append(Run("SFT"))
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
    try:
        runs.append(Run("DPO"))
    finally:
        del os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]
    for run in runs:
        assert not tiny.acts(ID, target(run), run.trainer), f"the wrapper acts: {run.name}"
    if judged_step(runs[-1].steps[0], 2).verdict is not Verdict.FIXED:
        raise AssertionError("accelerate does not divide")
    return result(runs, absent("nobody accumulates, or the loss is divided by somebody else"))


def result(runs: list[Run], outcome: Outcome) -> tiny.TrainingResult:
    losses = [loss for run in runs for step in run.steps for loss in step.losses]
    gradients = {f"{number} {key}": value for number, run in enumerate(runs) for key, value in run.gradients.items()}
    return tiny.TrainingResult(outcome, sum(losses) + sum(sum(run.evaluated) for run in runs), gradients)
