"""transformers divides the loss of each preference trainer, by the micro-batches of the step, and nobody does twice."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Trainer

from trl_hotfix.authoring import training
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import dpo_stub

(PATCH,) = (patch for patch in loading.load() if patch.id == "preference-grad-accum-scaling")
METHODS = [target.attribute.partition("Trainer")[0] for target in gates.targets_here(PATCH)]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trainer_of(method: str, *, steps: int = 2, deepspeed: bool = False) -> Any:
    """Return a trainer whose model takes ``**kwargs``. Its loss is the square of a weight times a number."""
    weight = torch.nn.Parameter(torch.tensor(0.5))
    trainer = dpo_stub(
        importlib.import_module(f"trl.trainer.{method.lower()}_trainer"),
        method,
        model=torch.nn.Linear(1, 1),
        weight=weight,
        optimizer=None,
        compute_loss_func=None,
        use_apex=False,
        current_gradient_accumulation_steps=steps,
        is_deepspeed_enabled=deepspeed,
        model_accepts_loss_kwargs=True,
        compute_loss_context_manager=nullcontext,
        _prepare_inputs=lambda inputs: inputs,
        get_batch_loss_metrics=lambda model, inputs, **kwargs: (weight.square() * inputs["number"], {}),
        store_metrics=lambda *args, **kwargs: None,
        state=SimpleNamespace(global_step=0),
        deepspeed=None,
    )
    vars(trainer.args).update(gradient_accumulation_steps=steps, n_gpu=0, device=torch.device("cpu"))
    trainer.accelerator.distributed_type = "DEEPSPEED" if deepspeed else "NO"
    trainer.accelerator.backward = lambda loss, **kwargs: loss.backward()
    return trainer


def gradient_of(trainer: Any, number: float = 1.0) -> float:
    trainer.weight.grad = None
    Trainer.training_step(trainer, trainer.model, {"number": number}, None)
    return float(trainer.weight.grad)


def test_each_micro_batch_of_each_step_is_divided(method: str) -> None:
    trainer = trainer_of(method)
    for number in (1.0, 2.0, 3.0):
        trainer.state.global_step = int(number) // 2
        assert gradient_of(trainer, number) == pytest.approx(number / 2)


def test_every_trainer_is_divided(method: str) -> None:
    assert [gradient_of(trainer_of(method)) for _ in range(3)] == [0.5] * 3


def test_a_step_of_one_micro_batch_is_left_alone(method: str) -> None:
    trainer = trainer_of(method, steps=1)
    assert gradient_of(trainer) == pytest.approx(1.0)
    assert trainer.model_accepts_loss_kwargs is True


@pytest.mark.parametrize("divides", [False, True], ids=["it does not divide", "it divides"])
def test_transformers_is_told_unless_deepspeed_divides(
    method: str, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "deepspeed_divides", lambda: divides)
    trainer = trainer_of(method, deepspeed=True)
    gradient_of(trainer)
    assert trainer.model_accepts_loss_kwargs is divides


def test_deepspeed_divides_before_transformers_4_49() -> None:
    assert training.deepspeed_divides() is (Version(transformers.__version__) < Version("4.49"))


def test_a_trainer_that_asks_nobody_gets_no_attribute(method: str) -> None:
    trainer = trainer_of(method)
    del trainer.model_accepts_loss_kwargs
    trainer.compute_loss(trainer.model, {"number": 1.0})
    assert not hasattr(trainer, "model_accepts_loss_kwargs")


def test_what_the_loss_returns_is_trls(method: str, switch: Any) -> None:
    loss, outputs = trainer_of(method).compute_loss(None, {"number": 3.0}, return_outputs=True)
    with switch.off():
        trainer = trainer_of(method)
        expected, expected_outputs = trainer.compute_loss(None, {"number": 3.0}, return_outputs=True)
    assert (float(loss), outputs) == (float(expected), expected_outputs)
    assert loss.requires_grad
