"""The sum of a step has each micro-batch, and what DeepSpeed does rightly stays as it is."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.call import Call
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.patches.beneath.deepspeed_offload_drops_micro_batches import METHOD, keep_the_sum
from trl_hotfix.testing import class_with_steps, deepspeed_method, micro_batch_under_deepspeed
from trl_hotfix.witness import Count

(PATCH,) = (patch for patch in loading.load() if patch.id == "deepspeed-offload-drops-micro-batches")
CLASSES = [class_with_steps(import_module(target.module)) for target in gates.targets_here(PATCH)]


@pytest.fixture(params=[each for each in CLASSES if each is not None], ids=lambda each: str(each.__name__))
def trainer_class(request: pytest.FixtureRequest) -> Any:
    """Each class whose step is the first of TRL's in a micro-batch."""
    return request.param


class Offloading:
    """An optimizer that offloads the gradients of two parameters, by the method of the installed DeepSpeed."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3)]
        vars(self).update(
            cpu_offload=True,
            cpu_offload_pin_memory=False,
            fp16_master_weights_and_gradients=False,
            low_precision_master_weights_and_grads=False,
            _offload_gradient_safety_enabled=False,
            _record_offload_copy=lambda: None,
            device="cpu",
            accumulated_grads_in_cpu={},
            temp_grad_buffer_for_gpu_offload=torch.zeros(3),
            grad_position={id(parameter): [0, 0, 0, len(parameter)] for parameter in self.parameters},
            get_param_id=id,
            get_param_gradient_attribute=lambda parameter: parameter.grad,
        )

    def train(self, trainer_class: Any, *micro_batches: float) -> list[list[float]]:
        """Go backward through the micro-batches of a step, and return what goes to the optimizer step."""
        for number, gradient in enumerate(micro_batches):
            self.micro_step_id = number
            self.is_gradient_accumulation_boundary = number == len(micro_batches) - 1
            for parameter in self.parameters:
                parameter.grad = gradient * torch.arange(1.0, len(parameter) + 1)
            micro_batch_under_deepspeed(trainer_class, SimpleNamespace(optimizer=self), self._reduce)
        return [parameter.grad.tolist() for parameter in self.parameters if parameter.grad is not None]

    def _reduce(self) -> None:
        for parameter in self.parameters:
            getattr(self, METHOD)(parameter)


setattr(Offloading, METHOD, deepspeed_method("zero/stage_1_and_2.py", METHOD))


def times(total: float) -> list[list[float]]:
    return [[total, 2 * total], [total, 2 * total, 3 * total]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_the_sum_of_each_step_has_each_micro_batch(trainer_class: Any, count: int) -> None:
    optimizer = Offloading()
    for first in (1.0, 3.0):
        gradients = [first * 2**number for number in range(count)]
        assert optimizer.train(trainer_class, *gradients) == times(sum(gradients))


def test_steps_of_unequal_length_have_each_micro_batch(trainer_class: Any) -> None:
    optimizer = Offloading()
    for count in (4, 3, 1, 5):
        assert optimizer.train(trainer_class, *[1.0] * count) == times(count)


def test_two_engines_keep_their_sums_apart(trainer_class: Any) -> None:
    assert Offloading().train(trainer_class, 1, 10, 100) == times(111)
    assert Offloading().train(trainer_class, 2, 20, 200) == times(222)


def test_deepspeed_alone_drops_those_between(trainer_class: Any, switch: Any) -> None:
    with switch.off():
        assert Offloading().train(trainer_class, 1, 10, 100, 1000) == times(1001)


class Optimizer:
    """It notes the number of the micro-batch with which it was called, and for which parameter."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[tuple[int, str]] = []
        defaults = {"cpu_offload": True, "micro_step_id": 0, "is_gradient_accumulation_boundary": False}
        vars(self).update({**defaults, **settings})

    def async_accumulate_grad_in_cpu_via_gpu(self, parameter: str) -> None:
        self.calls.append((self.micro_step_id, parameter))


def trainer_with(engine: Any) -> Any:
    wrapped = None if engine is None else SimpleNamespace(engine=engine)
    return SimpleNamespace(accelerator=SimpleNamespace(deepspeed_engine_wrapped=wrapped))


def acts_of(call: Call) -> int:
    """Make the call with the wrapper, and return 1 if it acted."""
    count = Count()
    call.end(count, keep_the_sum(call))
    return count.acted


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"micro_step_id": 0}, [(0, "a"), (0, "b")]),
        ({"micro_step_id": 1}, [(1, "a"), (0, "a"), (1, "b"), (0, "b")]),
        ({"micro_step_id": 3}, [(3, "a"), (0, "a"), (3, "b"), (0, "b")]),
        ({"micro_step_id": 0, "is_gradient_accumulation_boundary": True}, [(0, "a"), (0, "b")]),
        # ZeRO-1 calls it here alone: a copy would be added to the next step.
        ({"micro_step_id": 3, "is_gradient_accumulation_boundary": True}, [(3, "a"), (3, "b")]),
        ({"micro_step_id": 1, "cpu_offload": False}, [(1, "a"), (1, "b")]),
    ],
    ids=["first", "second", "fourth", "only", "last", "on the GPU"],
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
    assert keep_the_sum(Call(step, trainer, ("model",), {"inputs": " inputs"})) == "model inputs"
    assert optimizer.calls == calls
    assert vars(optimizer) == before
    optimizer.calls.clear()
    assert acts_of(Call(step, trainer, ("model", " inputs"))) == (len(calls) > 2)


def test_a_micro_batch_without_gradients_is_no_act() -> None:
    trainer = trainer_with(SimpleNamespace(optimizer=Optimizer(micro_step_id=1)))
    assert acts_of(Call(lambda: "loss", trainer)) == 0


@pytest.mark.parametrize("engine", [None, SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=object())])
def test_without_such_an_optimizer_the_step_is_as_it_was(engine: Any) -> None:
    assert keep_the_sum(Call(lambda: 1, trainer_with(engine))) == 1
    assert acts_of(Call(lambda: 1, trainer_with(engine))) == 0


def test_an_accelerator_that_knows_no_deepspeed_is_left_alone() -> None:
    assert keep_the_sum(Call(lambda: 1, SimpleNamespace(accelerator=object()))) == 1


def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    optimizer = Optimizer(micro_step_id=2)
    before = dict(vars(optimizer))

    def step() -> None:
        optimizer.async_accumulate_grad_in_cpu_via_gpu("a")
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        keep_the_sum(Call(step, trainer_with(SimpleNamespace(optimizer=optimizer))))
    assert vars(optimizer) == before


def test_a_copy_that_fails_leaves_the_number_of_the_micro_batch() -> None:
    class Full(Optimizer):
        def async_accumulate_grad_in_cpu_via_gpu(self, parameter: str) -> None:
            if self.micro_step_id == 0:
                raise MemoryError

    optimizer = Full(micro_step_id=2)
    with pytest.raises(MemoryError):
        keep_the_sum(
            Call(
                lambda: optimizer.async_accumulate_grad_in_cpu_via_gpu("a"),
                trainer_with(SimpleNamespace(optimizer=optimizer)),
            )
        )
    assert optimizer.micro_step_id == 2


def test_two_wrappers_copy_the_same_sum() -> None:
    optimizer = Optimizer(micro_step_id=1)
    trainer = trainer_with(SimpleNamespace(optimizer=optimizer))
    step = Call(lambda: optimizer.async_accumulate_grad_in_cpu_via_gpu("a"), trainer)
    keep_the_sum(Call(lambda: keep_the_sum(step), trainer))
    assert optimizer.calls[0] == (1, "a")
    assert set(optimizer.calls[1:]) == {(0, "a")}
