"""The step divides what nobody divides, and logs it, in releases of transformers that no stack has, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from trl_hotfix.patches.beneath import transformers_gradients_times_gas as patch

STEPS = 2


class Accelerator:
    """Divides by the micro-batches that it knows of; under DeepSpeed its engine does, whatever it knows."""

    def __init__(self, steps: int, distributed_type: str = "NO") -> None:
        self.gradient_accumulation_steps, self.distributed_type = steps, distributed_type

    def backward(self, loss: Any) -> None:
        divisor = STEPS if self.distributed_type == "DEEPSPEED" else self.gradient_accumulation_steps
        (loss / divisor).backward()


def a_trainer(accelerator: Accelerator, steps: int = STEPS, **attributes: Any) -> Any:
    weight = torch.nn.Parameter(torch.tensor(3.0))

    def compute_loss(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return weight * inputs

    defaults = {"compute_loss_func": None, "model_accepts_loss_kwargs": False, **attributes}
    args = SimpleNamespace(gradient_accumulation_steps=steps)
    return SimpleNamespace(accelerator=accelerator, args=args, weight=weight, compute_loss=compute_loss, **defaults)


def of_4_46_1(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    loss *= trainer.args.gradient_accumulation_steps
    trainer.accelerator.backward(loss)
    return loss.detach() / trainer.args.gradient_accumulation_steps


def of_4_46_3(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    loss = trainer.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
    trainer.accelerator.backward(loss)
    return loss.detach() / (trainer.args.gradient_accumulation_steps if num_items_in_batch is None else 1)


@pytest.fixture(params=[of_4_46_1, of_4_46_3])
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have transformers be a release whose step this is."""
    if request.param is of_4_46_1:
        # As it is in this transformers, which is older: accelerate is told of the accumulation.
        assert "GradientAccumulationPlugin" in Trainer.create_accelerator_and_postprocess.__code__.co_names
    else:
        monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", lambda self: None)
    return request.param


def accelerator_of(release: Any, distributed_type: str = "NO") -> Accelerator:
    return Accelerator(STEPS if release is of_4_46_1 else 1, distributed_type)


def step(release: Any, trainer: Any, items: Any = None) -> tuple[float, float]:
    """Run one micro-batch with the loss 5 times the weight, and return the gradient and what is logged."""

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return release(trainer, model, inputs, num_items_in_batch)

    before = trainer.compute_loss
    logged = patch.take_the_mean_of_the_micro_batches(training_step, trainer, (None, 5.0, items), {})
    assert trainer.compute_loss is before
    return float(trainer.weight.grad), float(logged)


@pytest.mark.parametrize("items", [None, 7], ids=["no count", "a count that nobody divides by"])
def test_gradient_and_log_are_the_mean(release: Any, items: Any) -> None:
    assert step(release, a_trainer(accelerator_of(release)), items) == (5 / 2, 15 / 2)


def test_a_step_of_three_is_divided_by_three(release: Any) -> None:
    trainer = a_trainer(accelerator_of(release), current_gradient_accumulation_steps=3)
    assert step(release, trainer) == pytest.approx((5 / 3, 15 / 3))


@pytest.mark.parametrize("divides", [{"model_accepts_loss_kwargs": True}, {"compute_loss_func": sum}])
def test_what_is_divided_by_the_count_stays(release: Any, divides: Any) -> None:
    trainer = a_trainer(accelerator_of(release), **divides)
    assert step(release, trainer, 7) == (5, 15)
    assert step(release, a_trainer(accelerator_of(release), **divides)) == (5 / 2, 15 / 2)


def test_without_accumulation_nothing_is_divided(release: Any) -> None:
    assert step(release, a_trainer(Accelerator(1), steps=1)) == (5, 15)


def test_deepspeed_divides_once(release: Any) -> None:
    gradient, _ = step(release, a_trainer(accelerator_of(release, "DEEPSPEED")))
    assert gradient == 5 / 2


def test_what_a_launcher_has_told_accelerate_to_divide_is_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", lambda self: None)
    assert step(of_4_46_3, a_trainer(Accelerator(STEPS))) == (5 / 2, 15 / 2)


def test_the_losses_of_several_gpus_are_logged_as_their_mean(release: Any) -> None:
    trainer = a_trainer(accelerator_of(release))
    trainer.compute_loss = lambda *args, **kwargs: trainer.weight * torch.tensor([1.0, 3.0])
    accelerator_backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss: accelerator_backward(loss.mean())
    assert step(release, trainer) == (2 / 2, 6 / 2)


def test_a_step_that_never_computes_the_loss_returns_its_own() -> None:
    trainer = a_trainer(Accelerator(1))
    trainer.weight.grad = torch.tensor(0.0)
    assert step(lambda *args: torch.tensor(4.0), trainer) == (0, 4)
