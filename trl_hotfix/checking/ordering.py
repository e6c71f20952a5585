"""The order of the rows: the same in every run, or reversed within each step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class AsListed:
    """A sampler of rows by number."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def settle(trainer: Any, rows: int, group: int, notes: dict[str, Any], *, is_reversed: bool) -> None:
    """Have the trainer's sampler draw the same order in every run.

    A step has so many ``rows``. A ``group`` of rows stays together, as the completions of a prompt do.
    """
    sampler_of = trainer._get_train_sampler

    def settled(*args: Any, **kwargs: Any) -> Any:
        import numpy
        import torch

        states = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            numpy.random.seed(0)
            sampler = sampler_of(*args, **kwargs)
            if sampler is None:
                return None
            numbers = list(sampler)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        if not all(isinstance(number, int) for number in numbers):
            return sampler
        notes["sampled"] = len(numbers)
        return _Sampler(reversed_in_steps(numbers, rows, group) if is_reversed else numbers)

    trainer._get_train_sampler = settled


def _Sampler(numbers: list[int]) -> Any:
    from torch.utils.data import Sampler

    return type("Settled", (AsListed, Sampler), {})(numbers)


def reversed_in_steps(numbers: list[int], rows: int, group: int) -> list[int]:
    """Return the numbers with the groups of each step in the opposite order."""
    found: list[int] = []
    for begin in range(0, len(numbers), rows):
        step = numbers[begin : begin + rows]
        groups = [step[place : place + group] for place in range(0, len(step), group)]
        found += [number for each in reversed(groups) for number in each]
    return found
