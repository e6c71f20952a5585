"""Train two steps with the real trainers, of two micro-batches and of the one that the epoch ends with, and evaluate.

The gradient that the optimizer is given is compared with the gradients of the losses of its micro-batches: it is their
mean or, where the loss of a micro-batch is divided by the tokens of the step, their sum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.data import labelled, preferences_of_several_lengths

ID = "transformers-divides-gradients-of-others-twice"
OVERLAYS = ("scikit-learn",)
"""BCO does not start without it."""

PARITY = False

MICRO_BATCHES = 2
METHODS = ("CPO", "ORPO", "BCO", "PRM", "TPO", "DPO", "KTO")


def train() -> tiny.TrainingResult:
    runs = {method: _Run(method, MICRO_BATCHES) for method in _methods()}
    outcomes = {
        f"{method}, step {number}": outcome
        for method, run in runs.items()
        for number, outcome in enumerate(run.outcomes())
    }
    if len({outcome.verdict for outcome in outcomes.values()}) != 1:
        raise AssertionError(f"the trainers, or their steps, do not agree: {outcomes}")
    outcome = next(iter(outcomes.values()))
    told = {run.trainer.accelerator.gradient_accumulation_steps for run in runs.values()}
    assert told in ({1}, {MICRO_BATCHES}), told
    for run in runs.values():
        assert run.acted in (None, 3 if told == {MICRO_BATCHES} else 0), run.acted
    if told == {1}:
        assert outcome.verdict is Verdict.FIXED, outcome
        outcome = absent("this transformers tells accelerate of one micro-batch")
    return tiny.TrainingResult(outcome, sum(run.loss for run in runs.values()), _gradients(runs))


def unaffected() -> tiny.TrainingResult:
    """Train without accumulation."""
    runs = {method: _Run(method, 1) for method in _methods()}
    assert not any(run.acted for run in runs.values()), {method: run.acted for method, run in runs.items()}
    loss = sum(run.loss for run in runs.values())
    return tiny.TrainingResult(absent("one micro-batch"), loss, _gradients(runs))


def _methods() -> list[str]:
    """Return the methods whose trainer this release has, without a step of its own."""
    classes = {method: tiny.classes(method)[0] for method in METHODS}
    return [
        method for method, trainer_class in classes.items() if trainer_class is not None and _inherits(trainer_class)
    ]


def _inherits(trainer_class: Any) -> bool:
    from transformers import Trainer

    # On what the patch puts there, ``__wrapped__`` leads to what is inherited.
    step = trainer_class.training_step
    while step is not Trainer.training_step and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step is Trainer.training_step


class _Run:
    """A run on six rows. ``steps`` has the gradients of the losses, and those that the optimizer is given."""

    def __init__(self, method: str, accumulated: int) -> None:
        import torch
        from transformers import TrainerCallback

        self.divides_by_tokens = method == "PRM"
        trainer_class, config_class = tiny.classes(method)
        self.steps: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        of_losses: list[dict[str, Any]] = []
        losses = []

        class Recorder(trainer_class):  # type: ignore[misc, valid-type]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                result = super().compute_loss(model, inputs, *args, **kwargs)
                loss = result[0] if isinstance(result, tuple) else result
                losses.append(float(loss.detach()))
                if loss.requires_grad:
                    trainable = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
                    gradients = torch.autograd.grad(loss, list(trainable.values()), retain_graph=True)
                    of_losses.append(dict(zip(trainable, gradients, strict=True)))
                return result

        def end_step(policy: Any) -> None:
            self.steps.append((of_losses.copy(), tiny.gradients_of(policy)))
            of_losses.clear()

        class Gradients(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
                end_step(model)

        with tempfile.TemporaryDirectory() as folder:
            data = _data(method)
            torch.manual_seed(0)
            reference = {"ref_model": tiny.llama(folder, seed=1)} if method in ("BCO", "DPO", "KTO") else {}
            self.trainer = tiny.trainer(
                Recorder,
                model=_model(method, folder),
                args=tiny.config(config_class, **_settings(accumulated)),
                train_dataset=data,
                eval_dataset=data,
                tokenizer=tiny.tokenizer(),
                callbacks=[Gradients()],
                **reference,
            )
            self.trainer.train()
            self.trainer.evaluate()
        self.loss = sum(losses)

    @property
    def acted(self) -> int | None:
        """In how many steps the patch acted. None: it is not on."""
        names = {f"{cls.__module__}:{cls.__name__}.training_step" for cls in type(self.trainer).__mro__}
        known = [tiny.acts(ID, target, self.trainer) for target in names]
        acts = [acted for acted in known if acted is not None]
        return sum(acts) if acts else None

    def outcomes(self) -> Iterator[Outcome]:
        """Judge the gradients of each step, each of their numbers."""
        assert [len(of_losses) for of_losses, _ in self.steps] == [MICRO_BATCHES, 1], self.steps
        for of_losses, given in self.steps:
            divisor = 1 if self.divides_by_tokens else len(of_losses)
            expected = {name: sum(one[name] for one in of_losses) / divisor for name in of_losses[0]}
            right = _projected(expected)
            outcome = judge(_projected(given), right=right, wrong=right / MICRO_BATCHES)
            factor = 1 if outcome.verdict is Verdict.FIXED else 1 / MICRO_BATCHES
            for name, value in expected.items():
                assert float((given[name] - value * factor).abs().max()) < 1e-6, name
            yield outcome


def _settings(accumulated: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulated,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_length": 32,
        "max_prompt_length": 16,
    }


def _data(method: str) -> Any:
    from datasets import Dataset

    if method == "PRM":
        steps = [["w3 w4", "w5"], ["w3", "w4 w5 w6 w7"], ["w8", "w9 w3"]] * 2
        rows = [{"prompt": "w1 w2", "completions": each, "labels": [True, False]} for each in steps]
        return Dataset.from_list(rows)
    data = preferences_of_several_lengths().select(range(6))
    if method == "TPO":
        return data.map(lambda row: {"reference": row["chosen"]})
    return labelled(data.select(range(3))) if method in ("BCO", "KTO") else data


def _model(method: str, folder: str) -> Any:
    import torch
    from transformers import AutoModelForTokenClassification

    policy = tiny.llama(folder, seed=0)
    if method != "PRM":
        return policy
    torch.manual_seed(0)
    steps_classified = AutoModelForTokenClassification.from_pretrained(f"{folder}/llama-0", num_labels=2)
    if tiny.state.variant != "lora":
        return steps_classified
    from peft import get_peft_model

    adapter = tiny.lora()
    adapter.task_type = "TOKEN_CLS"
    return get_peft_model(steps_classified, adapter)


def _projected(gradients: dict[str, Any]) -> float:
    import torch

    flat = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
    return float((flat * torch.cos(torch.arange(len(flat)))).sum())


def _gradients(runs: dict[str, _Run]) -> dict[str, Any]:
    return {
        f"{name} {number} {key}": value
        for name, run in runs.items()
        for number, (_, given) in enumerate(run.steps)
        for key, value in given.items()
    }
