"""Each micro-batch goes backward with its share of the step, and is divided once."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from trl_hotfix.testing import online_dpo_stub


@pytest.fixture(params=["online_dpo", "xpo", "nash_md"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    for name in (f"trl.experimental.{request.param}.{request.param}_trainer", f"trl.trainer.{request.param}_trainer"):
        try:
            return import_module(name)
        except ImportError:
            continue
    pytest.skip(f"this release has no {request.param}")


class Run:
    """A trainer whose losses change from micro-batch to micro-batch, and what it goes backward with."""

    def __init__(self, module: ModuleType, *, steps: int = 4, counts: bool = True, **accelerator: Any) -> None:
        self.trainer = online_dpo_stub(module, gradient_accumulation_steps=steps)
        self.counts = counts
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
        self.backward_is_trls.append(self.trainer.accelerator.backward == self.backward)
        self.options.append(options)
        self.losses.append(float(loss.detach()))
        self.gradients.append(torch.autograd.grad(loss, self.trainer.model.weight)[0])

    def train(self, *counts: int) -> Run:
        """Compute a micro-batch for each of ``counts``, those of its step. The second is after an evaluation."""
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


@pytest.fixture
def undivided(module: ModuleType, switch: Any) -> Run:
    """A run of TRL alone."""
    with switch.off():
        return Run(module, steps=1).train(1, 1, 1)


# The last step of an epoch may have fewer micro-batches.
@pytest.mark.parametrize("counts", [(4, 4, 4), (4, 4, 2), (3, 1, 2)], ids=str)
def test_each_micro_batch_has_its_share_of_the_step(module: ModuleType, undivided: Run, counts: Any) -> None:
    run = Run(module).train(*counts)
    assert len(set(undivided.losses)) == 3
    assert run.losses == [pytest.approx(loss / count) for loss, count in zip(undivided.losses, counts, strict=True)]
    for gradient, whole, count in zip(run.gradients, undivided.gradients, counts, strict=True):
        torch.testing.assert_close(gradient, whole / count)


def test_where_transformers_counts_none_the_arguments_say_how_many(module: ModuleType, undivided: Run) -> None:
    run = Run(module, counts=False).train(4, 4, 4)
    assert run.losses == [pytest.approx(loss / 4) for loss in undivided.losses]


def test_the_logged_loss_stays(module: ModuleType, undivided: Run) -> None:
    assert Run(module).train(4, 4, 2).logged == [pytest.approx(loss / 4) for loss in undivided.losses]


@pytest.mark.parametrize(
    ("counts", "accelerator"),
    [
        ((1, 1, 1), {}),
        ((4, 4, 4), {"distributed_type": "DEEPSPEED"}),
        ((4, 4, 4), {"gradient_accumulation_steps": 4}),
        ((4, 4, 4), {"gradient_accumulation_steps": 2}),
    ],
    ids=["one micro-batch", "DeepSpeed divides", "accelerate divides", "accelerate divides by another number"],
)
def test_what_is_divided_elsewhere_is_left_to_it(
    module: ModuleType, undivided: Run, counts: Any, accelerator: dict[str, Any]
) -> None:
    run = Run(module, **accelerator).train(*counts)
    assert run.losses == undivided.losses
    assert run.backward_is_trls == [True] * 3


def test_two_trainers_are_divided_each_by_its_own_number(module: ModuleType, undivided: Run) -> None:
    one, other = Run(module, steps=2), Run(module, steps=5)
    one.train(2), other.train(5), one.train(2)
    assert one.losses == [pytest.approx(loss / 2) for loss in undivided.losses[:2]]
    assert other.losses == [pytest.approx(undivided.losses[0] / 5)]


def test_options_of_the_backward_are_handed_on(module: ModuleType) -> None:
    run = Run(module)
    run.trainer.args.optim = OptimizerNames.LOMO
    run.trainer._get_learning_rate = lambda: 0.5
    assert run.train(4).options == [{"learning_rate": 0.5}]


def test_the_backward_is_put_back(module: ModuleType) -> None:
    run = Run(module)
    accelerator = run.trainer.accelerator
    run.train(4)
    assert accelerator.backward == run.backward
    failing = SimpleNamespace(backward=lambda loss: 1 / 0)
    accelerator.backward = failing.backward
    with pytest.raises(ZeroDivisionError):
        run.train(4)
    assert accelerator.backward is failing.backward
