"""DeepSpeed's hook divides exactly where the backward asks for it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.call import Call
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.patches.beneath.deepspeed_divides_by_accumulation_twice import HOOK, divide_if_told
from trl_hotfix.testing import class_with_steps, deepspeed_method, micro_batch_under_deepspeed
from trl_hotfix.witness import Count

(PATCH,) = (patch for patch in loading.load() if patch.id == "deepspeed-divides-by-accumulation-twice")
CLASSES = [class_with_steps(import_module(target.module)) for target in gates.targets_here(PATCH)]


@pytest.fixture(params=[each for each in CLASSES if each is not None], ids=lambda each: str(each.__name__))
def trainer_class(request: pytest.FixtureRequest) -> Any:
    """Each class whose step is the first of TRL's in a micro-batch."""
    return request.param


class Engine:
    """An engine with DeepSpeed's hook on two outputs of its model, whose gradients it notes."""

    def __init__(self, micro_batches: int = 4) -> None:
        self.micro_batches = micro_batches
        self.gradients: list[float] = []
        self.losses: list[Any] = []

    def gradient_accumulation_steps(self) -> int:
        return self.micro_batches

    def forward(self) -> None:
        # DeepSpeed hands the bound method to the outputs.
        self.hooks = [getattr(self, HOOK), getattr(self, HOOK)]

    def backward(self, loss: float, retain_graph: bool = False, *, scale_wrt_gas: bool = True) -> str:
        self.losses.append((loss, retain_graph, scale_wrt_gas))
        self.gradients += [float(hook(torch.tensor(loss))) for hook in self.hooks]
        return "done"

    def train(self, trainer_class: Any, *losses: float, **options: Any) -> list[float]:
        """Run a micro-batch for each loss through TRL's step, and return the gradients at both outputs."""
        self.gradients = []
        for loss in losses:

            def micro_batch(loss: float = loss) -> None:
                self.forward()
                self.backward(loss, **options)

            micro_batch_under_deepspeed(trainer_class, self, micro_batch)
        return self.gradients


setattr(Engine, HOOK, deepspeed_method("engine.py", HOOK))


def test_no_micro_batch_is_divided_again(trainer_class: Any) -> None:
    engine = Engine()
    assert engine.train(trainer_class, 1.0, 2.0, 3.0, 4.0, scale_wrt_gas=False) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert engine.train(trainer_class, 5.0, scale_wrt_gas=False) == [5, 5]


@pytest.mark.parametrize("options", [{"scale_wrt_gas": True}, {}], ids=["it is asked to", "it is not asked"])
def test_deepspeed_divides_where_transformers_does_not(trainer_class: Any, options: dict[str, Any]) -> None:
    assert Engine().train(trainer_class, 4.0, 8.0, **options) == [1, 1, 2, 2]


def test_two_engines_divide_each_by_its_own_number(trainer_class: Any) -> None:
    one, other = Engine(2), Engine(8)
    for engine in (one, other, one):
        assert engine.train(trainer_class, 8.0, scale_wrt_gas=False) == [8, 8]
        assert engine.train(trainer_class, 8.0) == [8 / engine.micro_batches] * 2


def test_deepspeed_alone_divides_in_any_case(trainer_class: Any, switch: Any) -> None:
    with switch.off():
        assert Engine().train(trainer_class, 1.0, scale_wrt_gas=False) == [0.25, 0.25]


def trainer_with(engine: Any) -> Any:
    wrapped = None if engine is None else SimpleNamespace(engine=engine)
    return SimpleNamespace(accelerator=SimpleNamespace(deepspeed_engine_wrapped=wrapped))


def acts_of(call: Call) -> int:
    """Make the call with the wrapper, and return 1 if it acted."""
    count = Count()
    call.end(count, divide_if_told(call))
    return count.acted


@pytest.mark.parametrize(
    ("options", "acts"), [({"scale_wrt_gas": False}, 1), ({"scale_wrt_gas": True}, 0), ({}, 0)], ids=str
)
def test_it_acts_only_where_the_bug_is(options: dict[str, Any], acts: int) -> None:
    engine = Engine()

    def step() -> None:
        engine.forward()
        engine.backward(1.0, **options)

    assert acts_of(Call(step, trainer_with(engine))) == acts


def test_step_and_backward_are_handed_on() -> None:
    engine = Engine()
    before = dict(vars(engine))

    def step(model: str, inputs: str) -> tuple[str, str]:
        engine.hooks = []
        assert vars(engine).keys() > before.keys() | {HOOK, "backward"}
        return model + inputs, engine.backward(1.5, True, scale_wrt_gas=False)

    assert divide_if_told(Call(step, trainer_with(engine), ("model",), {"inputs": " inputs"})) == (
        "model inputs",
        "done",
    )
    assert engine.losses == [(1.5, True, False)]
    assert vars(engine) == {**before, "hooks": []}


@pytest.mark.parametrize("engine", [None, Engine(micro_batches=1)], ids=["no engine", "one micro-batch"])
def test_without_accumulation_the_engine_is_not_touched(engine: Any) -> None:
    before = {} if engine is None else dict(vars(engine))

    def step() -> bool:
        return engine is None or vars(engine) == before

    assert divide_if_told(Call(step, trainer_with(engine))) is True
    assert acts_of(Call(step, trainer_with(engine))) == 0


def test_an_accelerator_that_knows_no_deepspeed_is_left_alone() -> None:
    assert divide_if_told(Call(lambda: 1, SimpleNamespace(accelerator=object()))) == 1


def test_a_backward_that_the_engine_does_not_see_is_divided_as_by_deepspeed() -> None:
    engine = Engine()
    assert divide_if_told(Call(lambda: getattr(engine, HOOK)(torch.tensor(8.0)), trainer_with(engine))) == 2


def test_each_backward_of_a_micro_batch_is_asked_anew() -> None:
    engine = Engine()

    def step() -> None:
        engine.forward()
        for told in (False, True, False):
            engine.backward(4.0, scale_wrt_gas=told)

    divide_if_told(Call(step, trainer_with(engine)))
    assert engine.gradients == [4, 4, 1, 1, 4, 4]


def test_a_step_that_fails_leaves_the_engine_as_it_was() -> None:
    engine = Engine()
    before = dict(vars(engine))
    with pytest.raises(ZeroDivisionError):
        divide_if_told(Call(lambda: 1 / 0, trainer_with(engine)))
    assert vars(engine) == before


def test_each_micro_batch_returns_its_own_loss() -> None:
    engine = Engine()
    losses = [divide_if_told(Call(lambda loss: loss, trainer_with(engine), (loss,))) for loss in (1.0, 2.0)]
    assert losses == [1.0, 2.0]
