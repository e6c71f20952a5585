"""The witness: how often each trainer called a patched method, and in how many of these calls the wrapper acted.

The call itself knows whether its wrapper acted (``call``). Trainers are held weakly. The calls of functions, and of
methods of classes, belong to the process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Count:
    """The calls of one target with one patch, by one instance or in the process."""

    __slots__ = ("acted", "called")

    def __init__(self) -> None:
        self.called = self.acted = 0


class Counts:
    """The calls of one target with one patch: by instance, and those without an instance in ``process``.

    ``last`` is the instance of the newest call, as its id, with its count: nearly always the next call is its too.
    There is no lock. A finaliser, a signal handler or a fork may come at any line, and would wait for it for ever.
    """

    __slots__ = ("_by_id", "last", "process")

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], Count]] = {}
        self.process = Count()
        self.last: tuple[int, Count] = (0, self.process)

    def of(self, instance: Any) -> Count:
        """Return the count of ``instance``, which is new if it has not called this target yet.

        It is that of the process if the instance cannot be referenced weakly.
        """
        key = id(instance)
        known = self._by_id.get(key)
        if known is None or known[0]() is not instance:
            try:
                reference = weakref.ref(instance, functools.partial(self._forget, key))
            except TypeError:
                return self.process
            if known is not None:
                self._by_id.pop(key, None)
            # Two threads may come here with the same instance. Both get the count that is set first.
            known = self._by_id.setdefault(key, (reference, Count()))
        self.last = key, known[1]
        return known[1]

    def known(self, instance: Any) -> Count | None:
        """Return the count of ``instance``, or None if it has never called this target."""
        reference, count = self._by_id.get(id(instance), (None, None))
        return count if reference is not None and reference() is instance else None

    def every_count(self) -> list[Count]:
        """Return the count of the process and those of all instances that exist."""
        return [self.process, *(count for _, count in list(self._by_id.values()))]

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        known = self._by_id.get(key)
        if known is not None and known[0] is gone:
            self._by_id.pop(key, None)
        if self.last[0] == key:
            self.last = 0, self.process


_ALL: dict[tuple[str, str], Counts] = {}


def counts_of(patch_id: str, target: str) -> Counts:
    """Return the counts of the target ``module:attribute`` with this patch. They outlive the patch on its target."""
    return _ALL.setdefault((patch_id, target), Counts())


def every_target() -> list[tuple[tuple[str, str], Counts]]:
    """Return the counts of all targets that have been patched in this process, by patch and target."""
    return list(_ALL.items())


def total(patch_id: str) -> tuple[int, int]:
    """Return the calls of the targets of a patch by all instances that exist and by functions, and the acts."""
    counts = [count for key, counts in every_target() if key[0] == patch_id for count in counts.every_count()]
    return sum(count.called for count in counts), sum(count.acted for count in counts)


@contextmanager
def apart() -> Iterator[None]:
    """Leave the calls of functions in this block uncounted: they are those of a self-test."""
    before = [(counts.process, counts.process.called, counts.process.acted) for _, counts in every_target()]
    try:
        yield
    finally:
        for count, called, acted in before:
            count.called, count.acted = called, acted
