"""A trainer is put back to a moment: what its step changed in it, in its models and in the random generators."""

from __future__ import annotations

import random
from collections import UserDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trl_hotfix.recording import rewinding
from trl_hotfix.recording.rewinding import Generators, Moment, copied


class Kept:
    """An object that a class of TRL keeps from step to step."""

    __module__ = "trl.trainer.made_up_trainer"

    def __init__(self) -> None:
        self.mean, self.seen = 0.0, [1]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("average", torch.zeros(2))
        self.longest: int | None = 3
        self.cache = torch.ones(2)


def everything(trainer: Any) -> Any:
    """Return all that the test changes, as text."""
    return repr({**vars(trainer), "model": [*vars(trainer.model).items()], "kept": vars(trainer.kept)})


def make() -> Any:
    logs: Any = defaultdict(list, loss=[1.0])
    return SimpleNamespace(
        number=1,
        text="a",
        nothing=None,
        logs=logs,
        queue=deque([1, 2], maxlen=2),
        names={"a"},
        pair=([1], torch.zeros(2)),
        batch=UserDict({"ids": torch.arange(3)}),
        kept=Kept(),
        model=Model(),
    )


def change(trainer: Any) -> None:
    trainer.number, trainer.text, trainer.nothing, trainer.new = 2, "b", [], "new"
    trainer.logs["loss"].append(2.0)
    trainer.logs["kl"].append(3.0)
    trainer.queue.append(3)
    trainer.names.add("b")
    trainer.pair[0].append(2)
    trainer.pair[1].add_(1)
    trainer.batch["ids"].mul_(2)
    trainer.batch["mask"] = 1
    trainer.kept.mean, trainer.kept.more = 1.0, 2
    trainer.kept.seen.clear()
    trainer.model.average.add_(1)
    trainer.model.longest, trainer.model.l_aux = 8, 0.5
    trainer.model.cache = torch.zeros(3)
    trainer.model.eval()


def test_everything_that_a_step_changes_is_put_back() -> None:
    trainer = make()
    before, logs, cache = everything(trainer), trainer.logs["loss"], trainer.model.cache
    moment = Moment(trainer)
    for _ in range(2):
        change(trainer)
        assert everything(trainer) != before
        moment.restore()
        assert everything(trainer) == before
    # The very objects, since others may hold them.
    assert trainer.logs["loss"] is logs
    assert trainer.model.cache is cache
    assert trainer.model.training


def test_random_numbers_come_again() -> None:
    trainer = make()
    trainer.own, trainer.of_torch = random.Random(1), torch.Generator().manual_seed(1)

    def draw() -> list[float]:
        of_torch = torch.rand(1, generator=trainer.of_torch)
        return [random.random(), np.random.rand(), float(torch.rand(1)), trainer.own.random(), float(of_torch)]

    moment = Moment(trainer)
    first = draw()
    moment.restore()
    assert draw() == first


def test_generators_alone_leave_the_trainer_as_it_is() -> None:
    generators = Generators()
    first = torch.rand(1)
    generators.restore()
    assert torch.equal(torch.rand(1), first)


def test_weights_are_not_copied_and_a_moved_one_is_named() -> None:
    trainer = make()
    moment = Moment(trainer)
    assert moment.moved() == ""
    with torch.no_grad():
        trainer.model.layer.bias.add_(1)
    assert moment.moved() == "SimpleNamespace.model.layer.bias"


def test_a_large_tensor_is_not_copied_and_a_moved_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewinding, "LARGEST", 1)
    trainer = make()
    moment = Moment(trainer)
    trainer.model.average.add_(1)
    assert moment.moved() == "SimpleNamespace.model['average']"


def test_how_ranks_share_gradients_is_left_as_it_is() -> None:
    trainer = make()
    trainer.model.wrapped = type("Wrapper", (Model,), {"__module__": "torch.nn.parallel.distributed"})()
    trainer.model.wrapped.longest = 1
    moment = Moment(trainer)
    trainer.model.wrapped.longest = 2
    moment.restore()
    assert trainer.model.wrapped.longest == 2


def test_a_copy_of_inputs_shares_no_tensor() -> None:
    model = Model()
    inputs = ({"ids": torch.arange(3), "rows": [{"x": torch.ones(1)}], "data": UserDict({"y": torch.ones(1)})}, model)
    copy = copied(inputs)
    copy[0]["ids"].add_(1)
    copy[0]["rows"][0]["x"].add_(1)
    copy[0]["data"]["y"].add_(1)
    assert inputs[0]["ids"].tolist() == [0, 1, 2]
    assert (float(inputs[0]["rows"][0]["x"]), float(inputs[0]["data"]["y"])) == (1.0, 1.0)
    assert copy[1] is model
