"""Means that know their number of rows or tokens.

TRL keeps one mean for each batch in a list, and logs the mean of the list. A short batch then weighs as a full one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class Mean(float):
    """The mean of ``count`` rows or tokens. To TRL it is the plain number."""

    count: float

    def __new__(cls, mean: float, count: float) -> Mean:
        self = super().__new__(cls, mean)
        self.count = count
        return self

    def __reduce__(self) -> Any:
        return Mean, (float(self), self.count)


@contextmanager
def counted(metrics: Mapping[str, list[Any]], count: float, names: re.Pattern[str]) -> Iterator[None]:
    """Give this ``count`` to the means that TRL appends to the lists of these ``names`` inside the block."""
    before = {name: len(values) for name, values in metrics.items()}
    yield
    for name, values in metrics.items():
        if names.fullmatch(name):
            start = before.get(name, 0)
            values[start:] = [Mean(value, count) for value in values[start:]]


def mean_of_all(means: Sequence[float]) -> float | None:
    """Return the mean of the rows or tokens of all these means; None if a count is not known, or a mean is NaN."""
    if not means or not all(isinstance(mean, Mean) and mean == mean for mean in means):
        return None
    total = sum(mean.count for mean in means)  # type: ignore[attr-defined]
    return sum(mean * mean.count for mean in means) / total if total else None  # type: ignore[attr-defined]


def count_of_all_ranks(trainer: Any, count: float) -> float:
    """Return the sum of the counts of all ranks. All of them have to call this."""
    import torch

    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return count
    return float(accelerator.gather(torch.tensor([float(count)], device=accelerator.device)).sum())


def without_doubled_rows(trainer: Any, rows: Any) -> Any:
    """Return the rows of all ranks without those that the dataloader doubled to fill the last batch.

    ``rows`` is a tensor that was gathered, or a range. accelerate's ``gather_for_metrics`` leaves out the same.
    """
    state = trainer.accelerator.gradient_state
    return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows
