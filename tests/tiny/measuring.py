"""Record what a trainer computes: losses, batches, first gradients, and the messages of trl_hotfix."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class TrainingResult:
    """The result of one training run: an outcome as a self-test returns it, the first loss and first gradients."""

    outcome: Any
    loss: float | None = None
    gradients: dict[str, Any] = field(default_factory=dict)


class FirstStep:
    """Record a model's first outputs and the gradients of its first backward pass, by hooks."""

    def __init__(self, model: Any) -> None:
        self.outputs: Any = None
        self.gradients: dict[str, Any] = {}
        model.register_forward_hook(self._record_outputs, with_kwargs=True)
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue  # Weights beneath an adapter are frozen.
            parameter.register_hook(lambda gradient, name=name: self._record_gradient(name, gradient))

    def _record_outputs(self, model: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        import torch

        # A pass without gradients computes the reference, by a model that has an adapter.
        if self.outputs is None and torch.is_grad_enabled():
            self.outputs = outputs

    def _record_gradient(self, name: str, gradient: Any) -> None:
        # The hook of a parameter that is used twice is called once, with the sum.
        self.gradients.setdefault(name, gradient.detach().clone())


def measured(trainer_class: type) -> Any:
    """Return a subclass of the trainer that records its calls of ``compute_loss`` and the gradients of its first step.

    Its ``losses`` has one number for each call, ``batches`` the inputs of each call with their tensors cloned,
    ``keywords`` the keyword arguments of each call. Once ``train()`` has begun, ``step`` is a ``FirstStep``.
    Call this once for each run: two runs of one class share its records.
    """

    class Measured(trainer_class):  # type: ignore[misc, valid-type]
        losses: ClassVar[list[float]] = []
        batches: ClassVar[list[dict[str, Any]]] = []
        keywords: ClassVar[list[dict[str, Any]]] = []
        step: ClassVar[FirstStep | None] = None

        def train(self, *args: Any, **kwargs: Any) -> Any:
            type(self).step = self.step or FirstStep(self.model)
            return super().train(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            # Before the call: some releases take columns out of the batch.
            self.batches.append(_copied(inputs))
            self.keywords.append(dict(kwargs))
            result = super().compute_loss(model, inputs, *args, **kwargs)
            self.losses.append(loss_of(result))
            return result

    return Measured


def _copied(inputs: Any) -> Any:
    """Return a batch with its tensors cloned. GRPO of 0.14.0 is given a list of rows, and computes the rest itself."""
    if not isinstance(inputs, Mapping):
        return list(inputs)
    return {name: value.clone() if hasattr(value, "clone") else value for name, value in inputs.items()}


def loss_of(result: Any) -> float:
    """Return the loss in what ``compute_loss`` returned: a tensor, or a tuple of it and the outputs."""
    return float((result[0] if isinstance(result, tuple) else result).detach())


def gradient_differences(gradients: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    """Return the largest difference of each gradient from the gradient of the same name."""
    return [float((gradient - expected[name]).abs().max()) for name, gradient in gradients.items()]


def warnings_of(make: Any) -> tuple[Any, list[str]]:
    """Return what ``make()`` returns, and the messages that trl_hotfix logs meanwhile."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    logging.getLogger("trl_hotfix").addHandler(handler)
    try:
        return make(), messages
    finally:
        logging.getLogger("trl_hotfix").removeHandler(handler)
