"""OnlineDPO, XPO and NashMD without generation and data: what a micro-batch goes backward with."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from trl_hotfix.testing import online_dpo_stub


class OnlineStubRun:
    """A trainer whose losses change from micro-batch to micro-batch, and what it goes backward with.

    An engine that divides by ``divisor`` does so before the gradients.
    """

    def __init__(
        self, module: ModuleType, *, steps: int = 4, counts: bool = True, divisor: int | None = None, **accelerator: Any
    ) -> None:
        import torch

        self.trainer = online_dpo_stub(module, gradient_accumulation_steps=steps)
        self.counts, self.divisor = counts, divisor
        self.losses: list[float] = []
        self.gradients: list[Any] = []
        self.logged: list[float] = []
        self.options: list[dict[str, Any]] = []
        self.backward_is_trls: list[bool] = []
        model = self.trainer.model
        if hasattr(self.trainer, "_compute_losses"):
            units = torch.ones(1)
            self.trainer._compute_losses = lambda *args: (model.weight.square().sum(), units, units)
        vars(self.trainer.accelerator).update(backward=self.backward, **accelerator)

    def backward(self, loss: Any, **options: Any) -> None:
        import torch

        self.backward_is_trls.append(self.trainer.accelerator.backward == self.backward)
        self.options.append(options)
        self.losses.append(float(loss.detach()))
        self.gradients.append(torch.autograd.grad(loss / (self.divisor or 1), self.trainer.model.weight)[0])

    def train(self, *counts: int) -> Any:
        """Compute a micro-batch for each of ``counts``, those of its step. The second is after an evaluation."""
        import torch

        for number, count in enumerate(counts):
            if self.counts:
                self.trainer.current_gradient_accumulation_steps = count
            self.trainer.state.global_step = number // 2
            self.trainer.model.train(number != 1)
            self.logged.append(float(self.trainer.training_step(self.trainer.model, {"prompt": ["a"]}, None)))
            with torch.no_grad():
                # The next loss is another one.
                self.trainer.model.weight.mul_(1.5)
        return self
