"""The random generators of accelerators, as they were before a self-test.

A trainer that is made seeds all of them: ``set_seed`` calls ``torch.manual_seed``, which goes to every device, or to a
queue while a device has not been initialised. A job's own seed must not be lost to that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DEVICES = ("cuda", "xpu", "npu", "mlu", "musa")
_QUEUES = ("_queued_calls", "_lazy_seed_tracker")
"""What torch keeps of calls for a device that has not been initialised."""


@contextmanager
def of_accelerators_restored(torch: Any) -> Iterator[None]:
    """Put the states of the generators of all accelerators back, and the seeds that wait for a device.

    No device is initialised, and none is waited for: the states are on the CPU.
    """
    devices = [device for name in _DEVICES if (device := getattr(torch, name, None)) is not None]
    queues = [(device, name, _copied(value)) for device, name, value in _queues(devices)]
    states = states_of_accelerators(torch)
    mps = getattr(torch, "mps", None)
    of_mps = mps.get_rng_state() if mps is not None and torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        for device, name, before in queues:
            _put_back(getattr(device, name), before)
        for generator, state in states:
            generator.set_state(state)
        if of_mps is not None and mps is not None:
            mps.set_rng_state(of_mps)


def states_of_accelerators(torch: Any) -> list[tuple[Any, Any]]:
    """Return the generators of the devices that have been initialised, each with its state."""
    devices = [device for name in _DEVICES if (device := getattr(torch, name, None)) is not None]
    return [(generator, generator.get_state()) for device in devices for generator in _generators(device)]


def _queues(devices: list[Any]) -> Iterator[tuple[Any, str, Any]]:
    for device in devices:
        for name in _QUEUES:
            value = getattr(device, name, None)
            if value is not None:
                yield device, name, value


def _generators(device: Any) -> tuple[Any, ...]:
    """Return the generators of a device that has been initialised. Before that its queue has the seeds."""
    is_initialized = getattr(device, "is_initialized", bool)
    return tuple(getattr(device, "default_generators", ())) if is_initialized() else ()


def _copied(value: Any) -> Any:
    """Return what a queue, or an object that keeps queues, has now."""
    if isinstance(value, list):
        return list(value)
    return {name: copy.copy(part) for name, part in vars(value).items()} if hasattr(value, "__dict__") else None


def _put_back(value: Any, before: Any) -> None:
    # The list itself stays the same one: torch's own functions have it.
    if isinstance(value, list):
        value[:] = before
    elif before is not None:
        vars(value).update(before)
