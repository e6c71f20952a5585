"""Optimizer steps of two micro-batches of the preference trainers: is their gradient the mean, or the sum?"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

from .data import labelled, preferences_of_several_lengths, tokenizer
from .measuring import TrainingResult
from .models import llama
from .steps import acts, gradients_of
from .trainers import classes, config, trainer


def accumulated_steps(methods: Sequence[str]) -> TrainingResult:
    """Train two steps of two micro-batches with each of these trainers, and judge the gradients of all together.

    The loss is that of the last trainer.
    """
    from transformers import Trainer

    if "model_accepts_loss_kwargs" not in inspect.unwrap(Trainer.training_step).__code__.co_names:
        return TrainingResult(absent("this transformers does not ask whether to divide; 4.46 and 4.47 never do"))
    runs = {method: _Run(method) for method in methods}
    outcomes = [run.outcome for run in runs.values()]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return TrainingResult(outcomes[0], runs[methods[-1]].loss, _gradients(runs))


def unaffected_steps(patch_id: str, methods: Sequence[str]) -> TrainingResult:
    """Train without accumulation, and a model that says that it divides by nothing. The patch must not act."""
    runs = {f"one {method}": _Run(method, gradient_accumulation_steps=1) for method in methods}
    runs |= {f"told {method}": _Run(method, told=True) for method in methods}
    for name, run in runs.items():
        trainer_class = type(run.trainer).__mro__[1]
        target = f"{trainer_class.__module__}:{trainer_class.__name__}.compute_loss"
        assert not acts(patch_id, target, run.trainer), f"the wrapper acts: {name}"
        if run.outcome.verdict is Verdict.REPRODUCED:
            raise AssertionError(f"{name}: nobody divides: {run.outcome}")
    loss = sum(run.loss for run in runs.values())
    return TrainingResult(absent("nobody accumulates, or transformers divides"), loss, _gradients(runs))


def _gradients(runs: dict[str, _Run]) -> dict[str, Any]:
    return {
        f"{name} {number} {key}": value
        for name, run in runs.items()
        for number, step in enumerate(run.steps)
        for key, value in step.accumulated.items()
    }


@dataclass
class _Step:
    """The gradients of the losses of the micro-batches, and the gradient that the optimizer is given."""

    of_losses: list[dict[str, Any]] = field(default_factory=list)
    accumulated: dict[str, Any] = field(default_factory=dict)


class _Run:
    """A run of a real trainer. ``told``: the model has an attribute by which transformers divides."""

    def __init__(self, method: str, *, told: bool = False, **settings: Any) -> None:
        import torch
        from transformers import TrainerCallback

        trainer_class, config_class = classes(method)
        steps, losses = [_Step()], []

        class Recorder(trainer_class):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                result = super().compute_loss(model, inputs, *args, **kwargs)
                loss = result[0] if isinstance(result, tuple) else result
                losses.append(float(loss.detach()))
                # From 0.29 on the evaluation calls this method, too.
                if loss.requires_grad:
                    gradients = torch.autograd.grad(loss, list(trainable.values()), retain_graph=True)
                    steps[-1].of_losses.append(dict(zip(trainable, gradients, strict=True)))
                return result

        class Gradients(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                steps[-1].accumulated = gradients_of(policy)
                steps.append(_Step())

        defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
        defaults |= {"max_length": 32, "max_prompt_length": 16}
        words = tokenizer()
        words.bos_token = "<unk>"
        data = preferences_of_several_lengths()
        data = labelled(data) if method in ("KTO", "BCO") else data
        with tempfile.TemporaryDirectory() as folder:
            policy = llama(folder, seed=0)
            if told:
                policy.accepts_loss_kwargs = False
            reference = {} if method in ("CPO", "ORPO") else {"ref_model": llama(folder, seed=1)}
            torch.manual_seed(0)
            self.trainer = trainer(
                Recorder,
                model=policy,
                args=config(config_class, **{**defaults, **settings}),
                train_dataset=data,
                eval_dataset=data.select(range(4)),
                tokenizer=words,
                callbacks=[Gradients()],
                **reference,
            )
            trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
            self.trainer.train()
            self.trainer.evaluate()
        self.steps, self.loss = steps[:-1], sum(losses)
        self.outcome = self._judged(self.trainer.args.gradient_accumulation_steps)

    def _judged(self, accumulated: int) -> Any:
        """Judge the gradients of both steps, projected on fixed numbers. They are of one kind."""
        import torch

        def projected(gradients: dict[str, Any]) -> float:
            flat = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
            return float((flat * torch.cos(torch.arange(len(flat)))).sum())

        outcomes = []
        for step in self.steps:
            if len(step.of_losses) != accumulated:
                raise AssertionError(f"expected {accumulated} micro-batches: {len(step.of_losses)}")
            total = sum(projected(gradients) for gradients in step.of_losses)
            outcomes.append(judge(projected(step.accumulated), right=total / accumulated, wrong=total))
        if len(outcomes) != 2 or outcomes[0].verdict is not outcomes[1].verdict:
            raise AssertionError(f"expected two steps of one kind: {outcomes}")
        return outcomes[0]
