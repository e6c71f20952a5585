"""Train two steps of two micro-batches with the real GRPOTrainer and an entropy bonus that is next to nothing.

Each logged ``policy_loss`` is compared with the losses of the micro-batches: their sum where TRL divides by the tokens
of the step, their mean where it divides by those of a micro-batch. Losses, gradients and other metrics stay.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.grpo_runs import grpo

ID, TARGET = "grpo-policy-loss-metric-divided-by-gas", "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
OVERLAYS = ()
PARITY = False

KINDS = ("dapo", "cispo", "vespo")


def train() -> tiny.TrainingResult:
    from trl import GRPOConfig

    if not hasattr(GRPOConfig, "entropy_coef"):
        return tiny.TrainingResult(absent("this release has no entropy bonus"))
    runs = {kind: _run(loss_type=kind) for kind in KINDS}
    runs["adaptive"] = _run(loss_type="dapo", use_adaptive_entropy=True, entropy_coef_max=1e-9, entropy_coef_delta=0.0)
    outcomes = [outcome for run in runs.values() for outcome in run.outcomes()]
    if len(outcomes) != 2 * len(runs) or len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected two steps of each run, all of one kind: {outcomes}")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with a loss that is a mean of a micro-batch, without accumulation, and without the bonus."""
    runs = {
        "mean": _run(loss_type="grpo"),
        "one": _run(loss_type="dapo", gradient_accumulation_steps=1),
        "no bonus": _run(loss_type="dapo", entropy_coef=0.0),
    }
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run.trainer), f"the wrapper acts: {name}"
    steps = zip(runs["one"].logged, runs["one"].losses, strict=True)
    assert all(abs(logged - loss) < 1e-6 for logged, (loss,) in steps)
    assert runs["no bonus"].logged == []
    return _result(runs, absent("the metric is the loss of the step, or there is none"))


@dataclass
class _Run:
    """The losses of the micro-batches of each step, what was logged, and the gradients of each step."""

    trainer: Any = None
    losses: list[list[float]] = field(default_factory=lambda: [[]])
    logged: list[float] = field(default_factory=list)
    others: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)

    def outcomes(self) -> list[Any]:
        return [
            judge(logged, right=sum(losses), wrong=sum(losses) / len(losses))
            for logged, losses in zip(self.logged, self.losses, strict=True)
        ]


def _run(**settings: Any) -> _Run:
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    run = _Run()

    class Recording(GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            run.losses[-1].append(float(loss.detach()))
            return loss

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.gradients.append(tiny.gradients_of(run.trainer.model))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            run.losses.append([])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "policy_loss" in logs:
                run.logged.append(logs["policy_loss"])
            run.others.append({name: value for name, value in logs.items() if name in ("loss", "entropy", "reward")})

    defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "beta": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        prompts = [f"w{number} w{number + 1}" for number in range(8)]
        fields = {**defaults, "entropy_coef": 1e-9, "logging_steps": 1, **settings}
        run.trainer = grpo(Recording, policy, prompts=prompts, **fields)
        run.trainer.add_callback(Recorder)
        run.trainer.train()
    run.losses = [losses for losses in run.losses if losses]
    assert len(run.gradients) == len(run.losses) == 2
    return run


def _result(runs: dict[str, _Run], outcome: Any) -> tiny.TrainingResult:
    """Return the losses and other metrics added up, and all gradients: a metric's repair changes none of them."""
    gradients = {
        f"{name} {step} {key}": value
        for name, run in runs.items()
        for step, of_step in enumerate(run.gradients)
        for key, value in of_step.items()
    }
    losses = sum(loss for run in runs.values() for of_step in run.losses for loss in of_step)
    others = sum(value for run in runs.values() for logs in run.others for value in logs.values())
    return tiny.TrainingResult(outcome, losses + others, gradients)
