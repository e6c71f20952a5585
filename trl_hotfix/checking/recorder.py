"""What a run notes while it trains: the gradients of each step, the last weights, and the logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..relations.run import CLOCK, Run


def callback(trainer: Any, run: Run) -> Any:
    """Return a callback that fills ``run``."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = kwargs.get("optimizer") or trainer.optimizer
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            optimizer.register_step_pre_hook(lambda *_: run.gradients.append(dict(_gradients(trainer))))

        def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
            numbers = {name: float(value) for name, value in logs.items() if _is_number(name, value)}
            is_evaluation = any(name.startswith("eval_") for name in logs)
            # The last log is of the whole training.
            if "train_loss" not in logs:
                (run.evaluations if is_evaluation else run.logs).append(numbers)

    return Recorder()


def weights(trainer: Any) -> dict[str, Any]:
    """Return copies of the trained weights."""
    return {name: weight.detach().clone() for name, weight in _trained(trainer)}


def _gradients(trainer: Any) -> Iterator[tuple[str, Any]]:
    for name, weight in _trained(trainer):
        if weight.grad is not None:
            yield name, weight.grad.detach().clone()


def _trained(trainer: Any) -> Iterator[tuple[str, Any]]:
    for name, weight in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        if weight.requires_grad:
            yield name, weight


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not any(word in name for word in CLOCK)
