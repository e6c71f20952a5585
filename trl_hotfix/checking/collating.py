"""Collate a batch beside a longer row, and take that row out again: the same rows with wider padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BesideALongerRow:
    """Stands in place of a run's collator and calls it."""

    def __init__(self, collator: Any, notes: dict[str, Any]) -> None:
        self._collator, self._notes = collator, notes
        self._notes.setdefault("wider", 0)
        self._notes.setdefault("not wider", "each batch is as wide as the longer row already")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collator, name)

    def __call__(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        import copy

        plain = self._collator(copy.deepcopy(features), *args, **kwargs)
        longer = _longer(features)
        if longer is None or not _is_batch(plain):
            self._notes["not wider"] = "its collator makes no batch of tensors with a row each"
            return plain
        wide = self._collator([*copy.deepcopy(features), longer], *args, **kwargs)
        taken = _without_last(wide, len(features))
        if taken is None:
            self._notes["not wider"] = "its batches are not one row for each row of the data"
            return plain
        if any(_width(taken[name]) > _width(plain[name]) for name in plain if name in taken):
            self._notes["wider"] += 1
        return taken


def _is_batch(batch: Any) -> bool:
    return isinstance(batch, Mapping) or hasattr(batch, "keys")


def _longer(features: Any) -> Any:
    """Return a row that is as long as two of the longest."""
    if not isinstance(features, (list, tuple)) or not features or not isinstance(features[0], Mapping):
        return None
    longest = max(features, key=lambda row: len(str(dict(row))))
    return {name: _doubled(value) for name, value in longest.items()}


def _doubled(value: Any) -> Any:
    if isinstance(value, list) and value and not isinstance(value[0], (dict, list)):
        return [*value, *value]
    if hasattr(value, "dim") and value.dim() == 1 and len(value) > 1:
        return value.repeat(2)
    return value


def _without_last(batch: Any, count: int) -> Any:
    """Return a batch without its last row, or None where its tensors have not a row or two for each."""
    import torch

    taken = dict(batch)
    for name, value in taken.items():
        if isinstance(value, torch.Tensor) and value.dim():
            if len(value) == count + 1:
                taken[name] = value[:count]
            # Pairs: all that was chosen, and all that was rejected behind it.
            elif len(value) == 2 * (count + 1):
                taken[name] = torch.cat([value[:count], value[count + 1 : -1]])
            else:
                return None
        elif isinstance(value, list) and len(value) == count + 1:
            taken[name] = value[:count]
    return taken


def _width(value: Any) -> int:
    return value.shape[1] if hasattr(value, "dim") and value.dim() > 1 else 0
