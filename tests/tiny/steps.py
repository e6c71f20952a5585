"""Record every optimizer step of a trainer, of several micro-batches each, with its evaluations, and how it acted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl_hotfix import witness

from .measuring import gradient_differences, loss_of


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
            batch = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
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


def acts(patch_id: str, target: str, instance: Any) -> int | None:
    """Return in how many of its calls of ``target`` the patch acted, or None if the patch was not on."""
    count = witness.counts_of(patch_id, target).known(instance)
    return None if count is None else count.acted
