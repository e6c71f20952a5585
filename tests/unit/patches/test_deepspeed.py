"""The wrappers for DeepSpeed on engines that count: when do they act, and what do they leave behind?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.call import Call
from trl_hotfix.patches.beneath import deepspeed_divides_by_accumulation_twice as divides
from trl_hotfix.patches.beneath import deepspeed_offload_drops_micro_batches as drops


class Optimizer:
    """It notes the number of the micro-batch with which it was called, and for which parameter."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[tuple[int, str]] = []
        vars(self).update(
            {"cpu_offload": True, "micro_step_id": 0, "is_gradient_accumulation_boundary": False, **settings}
        )

    def async_accumulate_grad_in_cpu_via_gpu(self, parameter: str) -> None:
        self.calls.append((self.micro_step_id, parameter))


class Engine:
    """Its hook divides by the number of micro-batches."""

    def __init__(self, micro_batches: int = 4) -> None:
        self.micro_batches = micro_batches
        self.gradients: list[float] = []

    def gradient_accumulation_steps(self) -> int:
        return self.micro_batches

    def _backward_prologue_per_tensor(self, gradient: float) -> float:
        return gradient / self.micro_batches

    def backward(self, loss: float, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        self.gradients.append(self.hook(loss))


def trainer_with(engine: Any) -> Any:
    wrapped = SimpleNamespace(engine=engine) if engine is not None else None
    return SimpleNamespace(accelerator=SimpleNamespace(deepspeed_engine_wrapped=wrapped))


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"micro_step_id": 0}, [(0, "a"), (0, "b")]),
        ({"micro_step_id": 1}, [(1, "a"), (0, "a"), (1, "b"), (0, "b")]),
        ({"micro_step_id": 3}, [(3, "a"), (0, "a"), (3, "b"), (0, "b")]),
        ({"micro_step_id": 3, "is_gradient_accumulation_boundary": True}, [(3, "a"), (3, "b")]),
        ({"micro_step_id": 1, "cpu_offload": False}, [(1, "a"), (1, "b")]),
    ],
)
def test_the_sum_is_copied_between_the_first_and_the_last_micro_batch(
    settings: dict[str, Any], calls: list[tuple[int, str]]
) -> None:
    optimizer = Optimizer(**settings)
    before = dict(vars(optimizer))

    def step(model: str, inputs: str) -> str:
        for parameter in ("a", "b"):
            optimizer.async_accumulate_grad_in_cpu_via_gpu(parameter)
        return model + inputs

    trainer = trainer_with(SimpleNamespace(optimizer=optimizer))
    assert drops.keep_the_sum(Call(step, trainer, ("model",), {"inputs": " inputs"})) == "model inputs"
    assert optimizer.calls == calls
    assert vars(optimizer) == before


def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    optimizer = Optimizer(micro_step_id=2)
    before = dict(vars(optimizer))

    def step() -> None:
        optimizer.async_accumulate_grad_in_cpu_via_gpu("a")
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        drops.keep_the_sum(Call(step, trainer_with(SimpleNamespace(optimizer=optimizer))))
    assert vars(optimizer) == before


def test_a_copy_that_fails_leaves_the_number_of_the_micro_batch() -> None:
    class Full(Optimizer):
        def async_accumulate_grad_in_cpu_via_gpu(self, parameter: str) -> None:
            if self.micro_step_id == 0:
                raise MemoryError

    optimizer = Full(micro_step_id=2)

    def step() -> None:
        optimizer.async_accumulate_grad_in_cpu_via_gpu("a")

    with pytest.raises(MemoryError):
        drops.keep_the_sum(Call(step, trainer_with(SimpleNamespace(optimizer=optimizer))))
    assert optimizer.micro_step_id == 2


def test_two_wrappers_copy_the_same_sum() -> None:
    optimizer = Optimizer(micro_step_id=1)
    trainer = trainer_with(SimpleNamespace(optimizer=optimizer))

    def step() -> None:
        optimizer.async_accumulate_grad_in_cpu_via_gpu("a")

    drops.keep_the_sum(Call(lambda: drops.keep_the_sum(Call(step, trainer)), trainer))
    assert optimizer.calls[0] == (1, "a")
    assert set(optimizer.calls[1:]) == {(0, "a")}


@pytest.mark.parametrize("engine", [None, SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=object())])
def test_without_such_an_optimizer_the_step_is_as_it_was(engine: Any) -> None:
    assert drops.keep_the_sum(Call(lambda: 1, trainer_with(engine))) == 1


@pytest.mark.parametrize(
    ("options", "gradient"), [({"scale_wrt_gas": False}, 1.0), ({"scale_wrt_gas": True}, 0.25), ({}, 0.25)]
)
def test_the_hook_divides_only_if_it_is_to(options: dict[str, Any], gradient: float) -> None:
    engine = Engine()
    before = dict(vars(engine))

    def step() -> str:
        engine.hook = engine._backward_prologue_per_tensor
        engine.backward(1.0, **options)
        return "loss"

    assert divides.divide_if_told(Call(step, trainer_with(engine))) == "loss"
    assert engine.gradients == [gradient]
    del engine.hook
    assert {**vars(engine), "gradients": []} == {**before, "gradients": []}


@pytest.mark.parametrize("engine", [None, Engine(micro_batches=1)])
def test_without_accumulation_the_engine_is_not_touched(engine: Any) -> None:
    seen = []

    def step() -> None:
        seen.append(engine is None or {"backward", "_backward_prologue_per_tensor"}.isdisjoint(vars(engine)))

    divides.divide_if_told(Call(step, trainer_with(engine)))
    assert seen == [True]


def test_a_backward_that_the_engine_does_not_see_is_divided_as_by_deepspeed() -> None:
    engine = Engine()
    step = lambda: engine._backward_prologue_per_tensor(8.0)  # noqa: E731
    assert divides.divide_if_told(Call(step, trainer_with(engine))) == 2.0


def test_each_micro_batch_returns_its_own_loss() -> None:
    engine = Engine()
    losses = [divides.divide_if_told(Call(lambda loss: loss, trainer_with(engine), (loss,))) for loss in (1.0, 2.0)]
    assert losses == [1.0, 2.0]
