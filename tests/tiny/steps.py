"""Record every optimizer step of a trainer, of several micro-batches each, with its evaluations, and how it acted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from trl_hotfix import witness

from .measuring import TrainingResult, gradient_differences, loss_of


@dataclass
class MicroBatch:
    """One call of ``compute_loss``: its inputs, its arguments by name, and the loss that it returned."""

    inputs: dict[str, Any]
    keywords: dict[str, Any]
    loss: float


@dataclass
class Step:
    """An optimizer step. ``gradients`` are those of all its micro-batches, as the optimizer is given them."""

    weights: dict[str, Any]
    micro_batches: list[MicroBatch] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)

    def difference(self, expected: dict[str, Any]) -> float:
        """Return the largest difference of a gradient from the expected one."""
        assert self.gradients.keys() == expected.keys()
        return max(gradient_differences(self.gradients, expected))


def stepwise(trainer_class: type) -> Any:
    """Return a subclass of the trainer with ``steps``, and with ``evaluations``, a list of micro-batches."""
    from transformers import TrainerCallback

    class Gradients(TrainerCallback):  # type: ignore[misc]
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.trainer.steps[-1].gradients = gradients_of(self.trainer.model)
            self.trainer.is_new_step = True

    class Stepwise(trainer_class):  # type: ignore[misc, valid-type]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            self.steps: list[Step] = []
            self.evaluations: list[MicroBatch] = []
            self.is_new_step = True
            self.add_callback(Gradients(self))
            return super().train(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # Before the call: some releases take columns out of the batch.
            # GRPO of 0.14.0 is given a list of rows.
            named = inputs.items() if isinstance(inputs, Mapping) else ()
            batch = {name: value.clone() for name, value in named if hasattr(value, "clone")}
            if model.training and self.is_new_step:
                weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
                self.steps.append(Step(weights))
                self.is_new_step = False
            result = super().compute_loss(model, inputs, *args, **kwargs)
            calls = self.steps[-1].micro_batches if model.training else self.evaluations
            calls.append(MicroBatch(batch, dict(kwargs), loss_of(result)))
            return result

    return Stepwise


def gradients_of(model: Any) -> dict[str, Any]:
    """Return a copy of the gradients that the parameters of ``model`` have now."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def expected_gradients(model: Any, weights: dict[str, Any], loss: Any) -> dict[str, Any]:
    """Return the gradients of ``loss(model)`` at these weights."""
    model.load_state_dict(weights)
    model.zero_grad()
    loss(model).backward()
    return gradients_of(model)


def result_of_runs(runs: Mapping[str, Any], outcome: Any) -> TrainingResult:
    """Return the losses of all steps and evaluations of these runs, added up, and the gradients of all steps."""
    gradients = {
        f"{name} {number} {key}": value
        for name, run in runs.items()
        for number, step in enumerate(run.steps)
        for key, value in step.gradients.items()
    }
    micro_batches = [part for run in runs.values() for step in run.steps for part in step.micro_batches]
    micro_batches += [part for run in runs.values() for part in run.evaluations]
    return TrainingResult(outcome, sum(micro_batch.loss for micro_batch in micro_batches), gradients)


def acts(patch_id: str, target: str, instance: Any) -> int | None:
    """Return in how many of its calls of ``target`` the patch acted, or None if the patch was not on."""
    count = witness.counts_of(patch_id, target).known(instance)
    return None if count is None else count.acted


@contextmanager
def counted(patch_id: str, target: str = "") -> Iterator[Callable[[], witness.Count]]:
    """Yield a function that returns the calls, and the acts, of a patch or of one target of it since the block began.

    They are those of all trainers and of the process. A trainer may be gone by then: its ledger is kept.
    """
    ledgers = [witness.PROCESS, *witness._ledgers.all()]

    class Kept(witness.Ledger):
        def __init__(self, key: int = 0) -> None:
            super().__init__(key)
            ledgers.append(self)

    def total() -> witness.Count:
        counts = (
            count
            for ledger in ledgers
            for _, each, count in ledger.every()
            if each.patch == patch_id and target in ("", each.target)
        )
        return sum(counts, witness.Count())

    before = total()
    with mock.patch.object(witness, "Ledger", Kept):
        yield lambda: total() - before


@dataclass
class FormulaSteps:
    """A run beside a formula: its micro-batches, the gradients of each optimizer step, and those of each formula."""

    trainer: Any = None
    micro_batches: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    expected: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    _sums: dict[str, dict[str, Any]] = field(default_factory=dict)
    _factors: set[float] = field(default_factory=set)

    @property
    def result(self) -> TrainingResult:
        """The first loss and the gradients of all steps, without an outcome."""
        named = {f"{step}.{name}": value for step, part in enumerate(self.gradients) for name, value in part.items()}
        return TrainingResult(None, self.micro_batches[0].loss, named)

    @property
    def first_step(self) -> TrainingResult:
        """The first loss and the sum of the first gradients, without an outcome: equal under every transformers."""
        named = {name: value / self._factor for name, value in self.gradients[0].items()}
        return TrainingResult(None, self.micro_batches[0].loss, named)

    @property
    def _factor(self) -> float:
        # If every loss is NaN, so is what is compared.
        (factor,) = self._factors or {1.0}
        return factor

    def add(self, losses: Mapping[str, Any], trainable: Mapping[str, Any]) -> None:
        """Add the gradients of what each formula gives for a micro-batch."""
        import torch

        for name, loss in losses.items():
            gradients = torch.autograd.grad(loss, list(trainable.values()), retain_graph=True, allow_unused=True)
            sums = self._sums.setdefault(name, {})
            for parameter, gradient in zip(trainable, gradients, strict=True):
                sums[parameter] = sums.get(parameter, 0) + (0 if gradient is None else gradient)

    def end_step(self, trainable: Mapping[str, Any]) -> None:
        """Keep the accumulated gradients of the trainer and of the formulas."""
        self.gradients.append({name: parameter.grad.clone() for name, parameter in trainable.items()})
        self.expected.append(
            {name: {key: self._factor * value for key, value in sums.items()} for name, sums in self._sums.items()}
        )
        self._sums.clear()

    def measure_factor(self, trainer: Any) -> None:
        """Measure by what the trainer multiplies a loss before it goes backward. It depends on transformers."""
        backward = trainer.accelerator.backward

        def record_factor(loss: Any, *args: Any, **kwargs: Any) -> Any:
            steps, computed = trainer.accelerator.gradient_accumulation_steps, self.micro_batches[-1].loss
            if computed and math.isfinite(computed):  # The rows of a micro-batch can cancel out.
                self._factors.add(round(float(loss.detach()) / computed / steps, 4))
            return backward(loss, *args, **kwargs)

        trainer.accelerator.backward = record_factor


def loss_of_model(model: Any, weights: Any, micro_batch: MicroBatch) -> tuple[Any, Any]:
    """Return the loss of a micro-batch as a mixture of experts computes it, and the auxiliary loss that is in it.

    ``weights`` are those that it has then, unless they are None.
    """
    batch = {key: micro_batch.inputs[key] for key in ("input_ids", "attention_mask", "labels")}
    # transformers, where it passes one, divides the sum over the batch by this number of tokens.
    if micro_batch.keywords.get("num_items_in_batch") is not None:
        batch["num_items_in_batch"] = micro_batch.keywords["num_items_in_batch"]
    if weights is not None:
        model.load_state_dict(weights)
    outputs = model(**batch, output_router_logits=True)
    return outputs.loss, outputs.aux_loss
