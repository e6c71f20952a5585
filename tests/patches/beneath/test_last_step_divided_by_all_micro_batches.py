"""A step is divided by the micro-batches that it has; full steps, and what nobody divides, are as before."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID = "last-step-divided-by-all-micro-batches"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
CLASSES = {target.attribute.partition(".")[0]: target.module for target in gates.targets_here(PATCH)}


@pytest.fixture(params=list(CLASSES))
def name(request: pytest.FixtureRequest) -> str:
    """Each trainer of this release whose loop is transformers'."""
    return str(request.param)


class Run:
    """A trainer of four micro-batches a step. The loss of a micro-batch is a weight times a number."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(0.5))
        self.name, self.read = name, []
        settings = {"gradient_accumulation_steps": 4, "n_gpu": 0, "average_tokens_across_devices": False}
        usual = {
            "model": torch.nn.Linear(1, 1),
            "optimizer": None,
            "compute_loss": self.compute_loss,
            "compute_loss_context_manager": nullcontext,
            "compute_loss_func": None,
            "model_accepts_loss_kwargs": False,
            "use_apex": False,
            "maybe_activation_offload_context": nullcontext(),
            "state": SimpleNamespace(global_step=0),
            "_prepare_inputs": lambda inputs: inputs,
        }
        args = default_arguments(TrainingArguments, **settings)
        self.trainer = stub_trainer(getattr(import_module(CLASSES[name]), name), args, **{**usual, **attributes})
        accelerator = vars(self.trainer.accelerator)
        accelerator.update(distributed_type="NO", backward=lambda loss, **kwargs: loss.backward())

    def compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        self.read.append(self.trainer.args.gradient_accumulation_steps)
        return self.weight * inputs["number"]

    def step(self, *numbers: float) -> tuple[float, float]:
        """Fetch and run the micro-batches of a step, and return the gradient and the sum of what is logged."""
        self.weight.grad = None
        batches = [{"number": number} for number in numbers]
        device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
        fetched, items = self.trainer.get_batch_samples(iter(batches), len(batches), *device)
        assert [id(batch) for batch in fetched] == [id(batch) for batch in batches]
        logged = sum(float(self.trainer.training_step(self.trainer.model, batch, items)) for batch in fetched)
        assert self.trainer.args.gradient_accumulation_steps == 4
        assert self.weight.grad is not None
        return float(self.weight.grad), logged

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, f"{CLASSES[self.name]}:{self.name}.training_step", self.trainer)


@pytest.mark.parametrize("numbers", [(1.0,), (1.0, 3.0), (1.0, 3.0, 8.0)])
def test_a_short_step_is_the_mean_of_its_micro_batches(name: str, numbers: tuple[float, ...]) -> None:
    run = Run(name)
    mean = sum(numbers) / len(numbers)
    assert run.step(*numbers) == pytest.approx((mean, 0.5 * mean))
    assert run.acts == len(numbers)


def test_a_full_step_after_a_short_one_is_as_before(name: str, switch: Any) -> None:
    run = Run(name)
    run.step(1.0)
    found = run.step(1.0, 3.0, 5.0, 7.0)
    assert run.acts == 1
    assert run.read == [1, 4, 4, 4, 4]
    with switch.off():
        assert Run(name).step(1.0, 3.0, 5.0, 7.0) == found == (4.0, 2.0)


def test_a_loss_that_is_divided_by_the_tokens_is_not_divided_again(name: str) -> None:
    run = Run(name, model_accepts_loss_kwargs=True)
    run.trainer.current_gradient_accumulation_steps = 2
    for number in (1.0, 3.0):
        run.trainer.training_step(run.trainer.model, {"number": number}, 7)
    assert run.weight.grad is not None
    assert float(run.weight.grad) == 4.0


def test_a_step_that_nobody_fetched_is_a_full_one(name: str) -> None:
    run = Run(name)
    run.trainer.training_step(run.trainer.model, {"number": 2.0}, None)
    assert run.weight.grad is not None
    assert float(run.weight.grad) == 0.5
    assert not run.acts


def test_an_error_leaves_the_arguments_as_they_were(name: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no loss")

    run = Run(name, compute_loss=fails)
    run.trainer.current_gradient_accumulation_steps = 1
    with pytest.raises(RuntimeError, match="no loss"):
        run.trainer.training_step(run.trainer.model, {"number": 1.0}, None)
    assert run.trainer.args.gradient_accumulation_steps == 4


def test_transformers_alone_divides_by_all(name: str, switch: Any) -> None:
    with switch.off():
        assert Run(name).step(1.0, 3.0) == (1.0, 0.5)
