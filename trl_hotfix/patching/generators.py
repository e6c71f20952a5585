"""The random generators of accelerators, as they were before a self-test.

A trainer that is made seeds all of them: ``set_seed`` calls ``torch.manual_seed``, which goes to every device, or to a
queue while a device has not been initialised. A job's own seed must not be lost to that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
    restorers = restorers_of_accelerators(torch)
    try:
        yield
    finally:
        for device, name, before in queues:
            _put_back(getattr(device, name), before)
        for restore in restorers:
            restore()


def restorers_of_accelerators(torch: Any) -> list[Callable[[], Any]]:
    """Return what puts the generator of each device that has been initialised back to its state of now."""
    devices = [device for name in _DEVICES if (device := getattr(torch, name, None)) is not None]
    found: list[Callable[[], Any]] = [
        partial(each.set_state, each.get_state()) for device in devices for each in _generators(device)
    ]
    mps = getattr(torch, "mps", None)
    if mps is not None and torch.backends.mps.is_available():
        found.append(partial(mps.set_rng_state, mps.get_rng_state()))
    return found


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
