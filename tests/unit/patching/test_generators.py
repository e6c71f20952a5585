"""A self-test leaves the random generators of accelerators as they were, and the seeds that wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.patching import generators
from trl_hotfix.patching.isolation import undisturbed


class Tracker:
    """As torch's, which keeps the newest seed for all devices, and the order."""

    def __init__(self) -> None:
        self.manual_seed_all_cb: Any = None
        self.call_order: list[Any] = []


def a_torch(*, initialised: bool, name: str = "cuda") -> Any:
    """Return a stand-in for torch with two devices."""
    states: list[Any] = [torch.Generator().manual_seed(number) for number in (1, 2)]
    device = SimpleNamespace(
        is_initialized=lambda: initialised,
        default_generators=states,
        _queued_calls=["the first"],
        _lazy_seed_tracker=Tracker(),
    )
    mps = SimpleNamespace(is_available=lambda: False)
    return SimpleNamespace(**{name: device}, mps=None, backends=SimpleNamespace(mps=mps))


@pytest.mark.parametrize("name", ["cuda", "xpu", "npu"])
def test_the_generators_of_every_device_are_put_back(name: str) -> None:
    stand_in = a_torch(initialised=True, name=name)
    devices = getattr(stand_in, name).default_generators
    before = [generator.get_state() for generator in devices]
    with generators.of_accelerators_restored(stand_in):
        for generator in devices:
            generator.manual_seed(42)
    assert all(torch.equal(state, generator.get_state()) for state, generator in zip(before, devices, strict=True))


def test_the_seeds_that_wait_for_a_device_are_put_back() -> None:
    stand_in = a_torch(initialised=False)
    cuda, queue = stand_in.cuda, stand_in.cuda._queued_calls
    cuda.default_generators = SimpleNamespace()  # what is not initialised is not touched
    cuda._lazy_seed_tracker.manual_seed_all_cb = "1234"
    with generators.of_accelerators_restored(stand_in):
        queue.append("a seed")
        cuda._lazy_seed_tracker.manual_seed_all_cb = "42"
        cuda._lazy_seed_tracker.call_order.append("42")
    assert cuda._queued_calls is queue
    assert queue == ["the first"]
    assert vars(cuda._lazy_seed_tracker) == {"manual_seed_all_cb": "1234", "call_order": []}


def test_the_generator_of_mps_is_put_back() -> None:
    state = ["before"]
    mps = SimpleNamespace(get_rng_state=lambda: list(state), set_rng_state=lambda new: state.__setitem__(0, new[0]))
    available: Callable[[], bool] = lambda: True  # noqa: E731
    stand_in = SimpleNamespace(mps=mps, backends=SimpleNamespace(mps=SimpleNamespace(is_available=available)))
    with generators.of_accelerators_restored(stand_in):
        state[0] = "seeded"
    assert state == ["before"]


def test_torchs_own_queue_is_put_back() -> None:
    """On a machine without a device a seed waits in it, and may wait for a process with one."""
    before = list(torch.cuda._queued_calls), dict(vars(torch.cuda._lazy_seed_tracker))
    with undisturbed():
        torch.manual_seed(42)
        torch.cuda.manual_seed_all(42)
    assert (torch.cuda._queued_calls, vars(torch.cuda._lazy_seed_tracker)) == before
