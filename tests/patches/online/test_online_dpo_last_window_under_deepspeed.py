"""Each micro-batch under DeepSpeed has its share of its step, and no other run is touched."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

import tiny
from tiny.online_stub_runs import OnlineStubRun

ID = "online-dpo-last-window-under-deepspeed"


@pytest.fixture(params=["online_dpo", "xpo", "nash_md"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    for name in (f"trl.experimental.{request.param}.{request.param}_trainer", f"trl.trainer.{request.param}_trainer"):
        try:
            return import_module(name)
        except ImportError:
            continue
    pytest.skip(f"this release has no {request.param}")


class Run(OnlineStubRun):
    """A run under an engine that divides by ``divisor``."""

    def __init__(self, module: ModuleType, *, divisor: int | None = 4, counts: bool = True) -> None:
        engine = SimpleNamespace(gradient_accumulation_steps=lambda: divisor)
        deepspeed: dict[str, Any] = {
            "distributed_type": "DEEPSPEED",
            "deepspeed_engine_wrapped": SimpleNamespace(engine=engine),
        }
        super().__init__(module, divisor=divisor, counts=counts, **(deepspeed if divisor else {}))
        self.module = module.__name__

    @property
    def acts(self) -> int | None:
        (name,) = {base.__name__ for base in type(self.trainer).__mro__ if base.__module__ == self.module}
        return tiny.acts(ID, f"{self.module}:{name}.training_step", self.trainer)


@pytest.fixture
def undivided(module: ModuleType, switch: Any) -> Run:
    """A run of TRL alone, whose engine divides by nothing."""
    with switch.off():
        return Run(module, divisor=1).train(1, 1, 1, 1)


# The last step of an epoch may have fewer micro-batches.
@pytest.mark.parametrize("counts", [(2, 2, 4, 4), (4, 1, 3, 3), (3, 3, 3, 2)], ids=str)
def test_each_micro_batch_has_its_share_of_the_step(module: ModuleType, undivided: Run, counts: Any) -> None:
    run = Run(module).train(*counts)
    for gradient, whole, count in zip(run.gradients, undivided.gradients, counts, strict=True):
        torch.testing.assert_close(gradient, whole / count)
    assert run.acts == sum(count != 4 for count in counts)


def test_deepspeed_alone_divides_by_the_divisor_of_its_config(module: ModuleType, undivided: Run, switch: Any) -> None:
    with switch.off():
        run = Run(module).train(1, 2, 3, 4)
    for gradient, whole in zip(run.gradients, undivided.gradients, strict=True):
        torch.testing.assert_close(gradient, whole / 4)


def test_the_logged_loss_stays(module: ModuleType, undivided: Run) -> None:
    assert Run(module).train(4, 2, 1, 3).logged == undivided.logged


@pytest.mark.parametrize(
    ("counts", "options"),
    [((4, 4), {}), ((2, 2), {"counts": False}), ((2, 1), {"divisor": None})],
    ids=["full steps", "transformers does not count", "no DeepSpeed"],
)
def test_other_steps_are_left_to_trl(module: ModuleType, undivided: Run, counts: Any, options: Any) -> None:
    run = Run(module, **options).train(*counts)
    for gradient, whole in zip(run.gradients, undivided.gradients, strict=False):
        assert gradient.equal(whole / (run.divisor or 1))
    assert run.backward_is_trls == [True] * 2
    assert run.acts == 0


def test_two_trainers_have_each_its_own_divisor(module: ModuleType, undivided: Run) -> None:
    one, other = Run(module, divisor=2), Run(module, divisor=5)
    one.train(1), other.train(3), one.train(2)
    torch.testing.assert_close(one.gradients[0], undivided.gradients[0])
    torch.testing.assert_close(other.gradients[0], undivided.gradients[0] / 3)
    torch.testing.assert_close(one.gradients[1], undivided.gradients[1] / 2)


def test_options_of_the_backward_are_handed_on(module: ModuleType) -> None:
    run = Run(module)
    run.trainer.args.optim = OptimizerNames.LOMO
    run.trainer._get_learning_rate = lambda: 0.5
    assert run.train(2).options == [{"learning_rate": 0.5}]


def test_the_backward_is_put_back(module: ModuleType) -> None:
    run = Run(module).train(2)
    accelerator = run.trainer.accelerator
    assert accelerator.backward == run.backward
    assert run.backward_is_trls == [False]
    failing = SimpleNamespace(backward=lambda loss: 1 / 0)
    accelerator.backward = failing.backward
    with pytest.raises(ZeroDivisionError):
        run.train(2)
    assert accelerator.backward is failing.backward
