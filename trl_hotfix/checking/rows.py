"""The rows of a run: few of the user's, of unequal lengths, in their order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .shapes import ROWS, STEP

SEEN = 512
"""A run's rows come from the first so many."""


def cut(value: Any, count: int = ROWS) -> Any:
    """Return a dataset with few of its rows. It returns anything else as it is."""
    from datasets import Dataset, IterableDataset

    if isinstance(value, Dataset):
        return _of_table(value, count)
    if isinstance(value, IterableDataset):
        return value.take(count)
    if (
        isinstance(value, Mapping)
        and value
        and all(isinstance(each, (Dataset, IterableDataset)) for each in value.values())
    ):
        kind: Any = type(value)
        return kind({name: cut(each, count) for name, each in value.items()})
    return _of_torch(value, count)


def _of_table(rows: Any, count: int) -> Any:
    if len(rows) == 0:
        return rows
    seen = min(len(rows), SEEN)
    numbers = chosen([_length(row) for row in itertools.islice(rows, seen)], count)
    return rows.select(numbers)


def _of_torch(rows: Any, count: int) -> Any:
    from torch.utils.data import Dataset, Subset
    from torch.utils.data import IterableDataset as Stream

    if not isinstance(rows, Dataset) or isinstance(rows, Stream) or not hasattr(rows, "__len__"):
        return rows
    if len(rows) <= count and len(rows) % STEP == 0:
        return rows
    numbers = chosen([_length(rows[number]) for number in range(min(len(rows), SEEN))], count)
    return Subset(rows, numbers)


def chosen(lengths: Sequence[int], count: int) -> list[int]:
    """Return the numbers of ``count`` rows, in their order: of those that are not the longest, each length.

    Of fewer rows, as many as fill whole steps; fewer than a step are taken again until they fill one.
    """
    if len(lengths) <= count:
        whole = len(lengths) - len(lengths) % STEP
        return list(range(whole)) if whole else [number % len(lengths) for number in range(STEP)]
    by_length = sorted(range(len(lengths)), key=lambda number: (lengths[number], number))
    # The longest rows cost the most, and show nothing that others do not.
    short = by_length[: max(count, len(by_length) // 2)]
    return sorted(short[place * len(short) // count] for place in range(count))


def _length(row: Any) -> int:
    """Return about how long the text of a row is."""
    return len(str(row))


def held(value: Any) -> int | None:
    """Return how many rows a dataset has, or None where it does not say."""
    return len(value) if hasattr(value, "__len__") else None
