"""Train two epochs of 8 micro-batches with a real engine of DeepSpeed and an accumulation of 5.

How do the weights move? The steps have 5, 3, 5 and 3 micro-batches. Each step of SGD moves the weights by the mean of
the gradients of its micro-batches. They are those of the undivided loss of the plain model; that of OnlineDPO is
compared with the formula.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from contextlib import suppress
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.deepspeed_runs import DeepSpeedStep, acts, largest_difference, length, result_of, weights

ID = "online-dpo-last-window-under-deepspeed"
OVERLAYS = ()
PARITY = False
VARIANTS = "the gradients are divided by DeepSpeed, whatever model they are of"

ACCUMULATION = 5
SIZES = [5, 3, 5, 3]
STAGES = {"OnlineDPO": 2, "XPO": 1, "NashMD": 0}
"""Each method with a stage of ZeRO."""


def train() -> tiny.TrainingResult:
    runs = {method: _run(method, ACCUMULATION, stage) for method, stage in STAGES.items() if _can_train(method)}
    outcomes = [_judged(step) for run in runs.values() for step in run.steps if len(step.gradients) < ACCUMULATION]
    if not outcomes:
        return result_of(runs, absent("DeepSpeed carries the rest of an epoch over, and no step is short"))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the steps do not agree: {outcomes}")
    for method, run in runs.items():
        assert [len(step.gradients) for step in run.steps] == SIZES, method
        for step in run.steps:
            if len(step.gradients) == ACCUMULATION:
                assert largest_difference(step.moved, _mean(step)) < 1e-6, method
        assert acts(ID, run) in (None, 2 * 3), (method, acts(ID, run))
    return result_of(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with full steps only, and without accumulation."""
    runs = {"full": _run("OnlineDPO", 4, 2), "single": _run("OnlineDPO", 1, 2)}
    for name, run in runs.items():
        assert not acts(ID, run), name
        assert all(largest_difference(step.moved, _mean(step)) < 1e-6 for step in run.steps), name
    return result_of(runs, absent("no step is short"))


def _can_train(method: str) -> bool:
    """Return whether the release has the trainer. Nash-MD before 0.20 does not generate with recent transformers."""
    trainer_class, _ = tiny.classes(method)
    if trainer_class is None or method != "NashMD":
        return trainer_class is not None
    return hasattr(sys.modules[trainer_class.__module__].GeometricMixtureWrapper, "_is_stateful")


def _mean(step: DeepSpeedStep) -> dict[str, Any]:
    return {name: gradient / len(step.gradients) for name, gradient in step.sum_of().items()}


def _judged(step: DeepSpeedStep) -> Outcome:
    right = _mean(step)
    outcome = judge(length(step.moved), right=length(right), wrong=length(step.sum_of()) / ACCUMULATION)
    if outcome.verdict is Verdict.FIXED:
        assert largest_difference(step.moved, right) < 1e-6, largest_difference(step.moved, right)
    return outcome


def _run(method: str, accumulation: int, stage: int) -> Any:
    """Return a trainer that was trained for four steps, with ``steps`` and ``losses``."""
    import torch

    trainer_class, config_class = tiny.classes(method)
    unpatched = inspect.unwrap(trainer_class.training_step)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            if self.optimizer is None:
                # One group: transformers' second is empty for a model without biases, and DeepSpeed drops it.
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            if self.state.global_step == len(self.steps):
                self.steps.append(DeepSpeedStep(weights(self.model)))
            state = torch.get_rng_state()
            loss, gradients = undivided(self, inputs, *args)
            torch.set_rng_state(state)  # The same completions again.
            self.losses.append(loss)
            self.steps[-1].gradients.append(gradients)
            return super().training_step(model, inputs, *args)

    class HasItError(Exception):
        """The loss is known, and nothing else of the step is needed."""

    def undivided(run: Any, inputs: Any, *args: Any) -> tuple[float, dict[str, Any]]:
        """Return the loss of TRL's own step on the plain model, and its gradients."""
        found: list[Any] = []
        named = dict(run.model.named_parameters())

        def backward(loss: Any, **options: Any) -> None:
            found.extend([float(loss.detach()), torch.autograd.grad(loss, list(named.values()))])
            raise HasItError

        with shadowed(run.accelerator, "backward", backward), suppress(HasItError):
            unpatched(run, run.model, inputs, *args)
        loss, values = found
        gradients = dict(zip(named, values, strict=True))
        if method == "OnlineDPO":
            assert largest_difference(gradients, formula(run.model)) < 1e-6
        return loss, gradients

    def formula(model: Any) -> dict[str, Any]:
        with torch.no_grad():
            reference = tiny.online_log_probs(untrained, 4).sum(1)
        margin = tiny.online_log_probs(model, 4).sum(1) - reference
        loss = -torch.nn.functional.logsigmoid(0.5 * (margin[:2] - margin[2:])).mean()
        named = dict(model.named_parameters())
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    zero = {**tiny.deepspeed(stage), "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": len(SIZES), "learning_rate": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        model, untrained = (tiny.llama(folder, seed=0) for _ in range(2))
        torch.manual_seed(0)
        run = tiny.online_dpo(Recorder, config_class, model, **settings, deepspeed=zero)
        run.steps, run.losses = [], []
        run.train()
    after = [step.before for step in run.steps[1:]] + [weights(run.model)]
    for step, following in zip(run.steps, after, strict=True):
        step.moved = {name: step.before[name] - following[name] for name in step.before}
    return run
