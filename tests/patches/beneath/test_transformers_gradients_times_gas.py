"""The step divides what nobody divides, and logs it, also in the steps of transformers that no release runs with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin
from transformers import Trainer, TrainingArguments

from trl_hotfix.call import Call
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.patches.beneath.transformers_gradients_times_gas import take_the_mean_of_the_micro_batches
from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID = "transformers-gradients-times-gas"
STEPS = 2

(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.attribute.partition(".")[0]: target for target in gates.targets_here(PATCH)}


class Accelerator:
    """Divides by the micro-batches that it knows of; under DeepSpeed its engine does, whatever it knows."""

    def __init__(self, steps: int, distributed_type: str = "NO") -> None:
        self.gradient_accumulation_steps, self.distributed_type = steps, distributed_type

    def backward(self, loss: Any, **options: Any) -> None:
        divisor = STEPS if self.distributed_type == "DEEPSPEED" else self.gradient_accumulation_steps
        (loss / divisor).mean().backward()


class Run:
    """A trainer of TRL with the step of this transformers. The loss of a micro-batch is a weight, 3, times a number."""

    def __init__(self, name: str, steps: int = STEPS, accelerator: Any = None, **attributes: Any) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(3.0))
        self.computed: list[dict[str, Any]] = []
        self.target = TARGETS[name]
        self.trainer = stub_trainer(
            getattr(import_module(self.target.module), name),
            default_arguments(TrainingArguments, gradient_accumulation_steps=steps, n_gpu=0),
            **{
                "model": torch.nn.Linear(1, 1),
                "optimizer": None,
                "compute_loss": self.compute_loss,
                "compute_loss_context_manager": nullcontext,
                "compute_loss_func": None,
                "model_accepts_loss_kwargs": False,
                "use_apex": False,
                "state": SimpleNamespace(global_step=0),
                "_prepare_inputs": lambda inputs: inputs,
                **attributes,
            },
        )
        self.trainer.accelerator = accelerator or Accelerator(1)

    def compute_loss(self, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        self.computed.append({"model": model, **inputs, **options})
        return self.weight * inputs["number"]

    def step(self, number: Any, items: int | None = None) -> tuple[float, float]:
        """Run one micro-batch, and return the gradient and what is logged."""
        self.weight.grad = None
        logged = self.trainer.training_step(self.trainer.model, {"number": number}, items)
        assert self.trainer.compute_loss == self.compute_loss
        return float(self.weight.grad), float(logged)

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target.name, self.trainer)


@pytest.fixture(params=list(TARGETS))
def name(request: pytest.FixtureRequest) -> str:
    """Each trainer of this release whose step is transformers'."""
    return str(request.param)


def test_each_micro_batch_of_each_step_is_divided(name: str) -> None:
    run = Run(name)
    for micro_batch in range(4):
        run.trainer.state.global_step = micro_batch // STEPS
        number = float(micro_batch + 1)
        assert run.step(number) == (number / 2, 3 * number / 2)
    assert run.acts == 4


def test_gradients_add_up_to_those_of_the_mean(name: str) -> None:
    run = Run(name, steps=4)
    for number in (1.0, 2.0, 3.0, 6.0):
        run.trainer.training_step(run.trainer.model, {"number": number}, None)
    assert float(run.weight.grad) == 3.0


def test_two_trainers_are_divided_each_by_its_own_number(name: str) -> None:
    one, other = Run(name, steps=2), Run(name, steps=4)
    assert [one.step(8.0), other.step(8.0), one.step(4.0)] == [(4, 12), (2, 6), (2, 6)]


def test_transformers_alone_divides_only_the_log(name: str, switch: Any) -> None:
    with switch.off():
        assert Run(name).step(1.0) == (1.0, 1.5)


@pytest.mark.parametrize(
    ("items", "settings", "gradient"),
    [
        (None, {"steps": 1}, 4.0),
        (7, {"steps": 1}, 4.0),
        (7, {"model_accepts_loss_kwargs": True}, 4.0),
        (7, {"compute_loss_func": sum}, 4.0),
        (None, {"accelerator": Accelerator(STEPS)}, 2.0),
        (7, {"accelerator": Accelerator(STEPS)}, 2.0),
        (None, {"accelerator": Accelerator(1, "DEEPSPEED")}, 2.0),
    ],
    ids=["one", "one counted", "model divides", "function divides", "launcher", "launcher counted", "DeepSpeed"],
)
def test_what_is_divided_elsewhere_is_left_alone(
    name: str, switch: Any, items: Any, settings: Any, gradient: float
) -> None:
    run = Run(name, **settings)
    found = run.step(4.0, items)
    assert found[0] == gradient
    assert not run.acts
    with switch.off():
        assert Run(name, **settings).step(4.0, items) == found


def test_the_loss_is_computed_once_of_what_it_was(name: str) -> None:
    run = Run(name)
    run.step(5.0, 7)
    assert run.computed == [{"model": run.trainer.model, "number": 5.0, "num_items_in_batch": 7}]


def test_a_step_that_fails_has_its_own_loss_again(name: str) -> None:
    run = Run(name)
    with pytest.raises(TypeError):
        run.trainer.training_step(run.trainer.model, {"number": "x"}, None)
    assert run.trainer.compute_loss == run.compute_loss


# The steps of other releases of transformers. A step is what training_step does, of one micro-batch.
Step = Callable[..., Any]


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
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have transformers be a release with this step: 4.46.1 has accelerate divide, and multiplies before."""
    tells = {of_4_46_1: lambda self: GradientAccumulationPlugin(), of_4_46_3: lambda self: None}
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", tells[request.param])
    return request.param


def accelerator_of(step: Step, distributed_type: str = "NO") -> Accelerator:
    return Accelerator(STEPS if step is of_4_46_1 else 1, distributed_type)


def a_trainer(accelerator: Accelerator, steps: int = STEPS, **attributes: Any) -> Any:
    weight = torch.nn.Parameter(torch.tensor(3.0))
    defaults = {"compute_loss_func": None, "model_accepts_loss_kwargs": False, **attributes}
    return SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(gradient_accumulation_steps=steps),
        weight=weight,
        compute_loss=lambda model, inputs, num_items_in_batch=None: weight * inputs,
        **defaults,
    )


def run_step(step: Step, trainer: Any, items: Any = None, inputs: Any = 5.0) -> tuple[float, float]:
    """Run one micro-batch with the wrapper, and return the gradient and what is logged."""

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return step(trainer, model, inputs, num_items_in_batch)

    before = trainer.compute_loss
    logged = take_the_mean_of_the_micro_batches(Call(training_step, trainer, (None, inputs, items)))
    assert trainer.compute_loss is before
    return float(trainer.weight.grad), float(logged)


@pytest.mark.parametrize("items", [None, 7], ids=["no count", "a count that nobody divides by"])
def test_gradient_and_log_are_the_mean(step: Step, items: Any) -> None:
    assert run_step(step, a_trainer(accelerator_of(step)), items) == (5 / 2, 15 / 2)


def test_a_step_of_three_is_divided_by_three(step: Step) -> None:
    trainer = a_trainer(accelerator_of(step), current_gradient_accumulation_steps=3)
    assert run_step(step, trainer) == pytest.approx((5 / 3, 15 / 3))


@pytest.mark.parametrize("divides", [{"model_accepts_loss_kwargs": True}, {"compute_loss_func": sum}], ids=str)
def test_what_is_divided_by_the_count_stays(step: Step, divides: Any) -> None:
    assert run_step(step, a_trainer(accelerator_of(step), **divides), 7) == (5, 15)
    # Without a count nobody divides by it.
    assert run_step(step, a_trainer(accelerator_of(step), **divides)) == (5 / 2, 15 / 2)


def test_deepspeed_divides_once(step: Step) -> None:
    gradient, _ = run_step(step, a_trainer(accelerator_of(step, "DEEPSPEED")))
    assert gradient == 5 / 2


def test_the_losses_of_several_gpus_are_logged_as_their_mean(step: Step) -> None:
    assert run_step(step, a_trainer(accelerator_of(step)), inputs=torch.tensor([1.0, 3.0])) == (2 / 2, 6 / 2)


def test_a_step_that_never_computes_the_loss_returns_its_own() -> None:
    trainer = a_trainer(Accelerator(1))
    trainer.weight.grad = torch.tensor(0.0)
    assert run_step(lambda *args: torch.tensor(4.0), trainer) == (0, 4)
