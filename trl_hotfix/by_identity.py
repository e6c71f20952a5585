"""What is known of trainers, which are held weakly.

A trainer may be a dataclass, as TRL 1.16.0's ``trl.experimental.kto.KTOTrainer`` is. Such an object has no hash, and
equals another, so trainers do not fit into the dictionaries and sets of ``weakref``.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """A value for each of some objects, as long as the object exists."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __setitem__(self, instance: Any, value: Value) -> None:
        key = id(instance)
        self._by_id[key] = weakref.ref(instance, lambda gone: self._forget(key, gone)), value

    def get(self, instance: Any) -> Value | None:
        """Return the value of this very object, or None."""
        reference, value = self._by_id.get(id(instance), (None, None))
        return value if reference is not None and reference() is instance else None

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        # Another object may have the number by now.
        known = self._by_id.get(key)
        if known is not None and known[0] is gone:
            self._by_id.pop(key, None)
