"""Each micro-batch goes backward with its share of the step, and is divided once."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from tiny.online_stub_runs import OnlineStubRun as Run


@pytest.fixture(params=["online_dpo", "xpo", "nash_md"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    for name in (f"trl.experimental.{request.param}.{request.param}_trainer", f"trl.trainer.{request.param}_trainer"):
        try:
            return import_module(name)
        except ImportError:
            continue
    pytest.skip(f"this release has no {request.param}")


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
