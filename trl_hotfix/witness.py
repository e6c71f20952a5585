"""The witness: how often each trainer called a patched method, and in how many of these calls the wrapper acted.

A wrapper acts if it hands on other arguments than it was given, returns another result than TRL's method, or says
``act()``. One that asks for the act of its call (``act_of_this_call``) acts if it calls that, and not otherwise.
Trainers are held weakly. The calls of functions, and of methods of classes, belong to the process.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
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


class Call:
    """TRL's method as a wrapper is given it. It notes whether, and with what, the wrapper calls it."""

    # A ``__getattr__`` for the other attributes of the method would make each call take a quarter longer.

    __slots__ = ("__weakref__", "__wrapped__", "args", "calls", "kwargs", "mark", "marked", "raised", "result")

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self.__wrapped__ = wrapped
        self.calls = 0
        self.args: tuple[Any, ...] = ()
        self.kwargs = _NOTHING
        self.result: Any = None
        # Whether TRL's method has raised an error. The error itself would keep the batch of the call alive.
        self.raised = False
        self.marked = False
        self.mark: Mark | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.args, self.kwargs = args, kwargs
        try:
            self.result = self.__wrapped__(*args, **kwargs)
        except BaseException:
            self.raised = True
            raise
        return self.result

    @property
    def __name__(self) -> str:
        return str(self.__wrapped__.__name__)

    @property
    def __self__(self) -> Any:
        return self.__wrapped__.__self__  # type: ignore[attr-defined]

    @property
    def __func__(self) -> Any:
        return self.__wrapped__.__func__  # type: ignore[attr-defined]

    def unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the method was called once, with these very objects."""
        if self.calls != 1 or len(self.args) != len(args) or len(self.kwargs) != len(kwargs):
            return False
        # Loops take half the time of all() with map() or a generator.
        for handed_on, given in zip(self.args, args):  # noqa: B905
            if handed_on is not given:
                return False
        called_with = self.kwargs
        for name in kwargs:  # noqa: SIM110
            if called_with.get(name, _MISSING) is not kwargs[name]:
                return False
        return True

    def has_raised(self, error: BaseException) -> bool:
        """Return whether this error came out of TRL's method, and not of the wrapper."""
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code is _CALLING and step.tb_frame.f_locals["self"] is self:
                return True
            step = step.tb_next
        return False

    def end(self, count: Count, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count the call if a wrapper that was given these arguments, and has returned ``result``, has acted."""
        if self.mark is not None:
            acted = self.mark.end(count)
        else:
            own = result is self.result or _same(self.result, result)
            acted = not own or self.marked or self.raised or not self.unchanged(args, kwargs)
        if acted:
            count.acted += 1
        # What keeps the wrapped method for later must not keep the batch.
        self.args, self.kwargs, self.result = (), _NOTHING, None


_MISSING = object()
_NOTHING: dict[str, Any] = {}
"""No arguments by name. It is never changed."""

_CALLING = Call.__call__.__code__


class Mark:
    """The ``act`` of one call, also after its end. It keeps nothing of the call, and a pickle of it counts nothing."""

    __slots__ = ("_acted", "_count")

    def __init__(self) -> None:
        self._acted = False
        self._count: Count | None = None

    def __call__(self) -> None:
        if not self._acted and self._count is not None:
            self._count.acted += 1
        self._acted = True

    def end(self, count: Count) -> bool:
        """Return whether the call, which ends now, has acted. From now on ``count`` is told."""
        self._count = count
        return self._acted

    def __reduce__(self) -> Any:
        # `datasets` hashes pickles. A count would make each hash another one.
        return Mark, ()


def _same(before: Any, after: Any) -> bool:
    """Return whether a result is a new tuple or dictionary of the same objects as TRL's own."""
    if type(before) is type(after) is tuple:
        return len(before) == len(after) and all(map(is_, before, after))
    if type(before) is type(after) is dict:
        return list(before) == list(after) and all(map(is_, before.values(), after.values()))
    return False


def act() -> None:
    """Say that the wrapper from which this is called acts in this call.

    It is for a wrapper that changes an object in place, or what TRL's method does by other means than its arguments.
    Outside a call of a wrapper nothing happens.
    """
    call = _current_call()
    if call is not None:
        call.marked = True


def act_of_this_call() -> Mark:
    """Return the ``act`` of this call of the wrapper, for what is called later: a hook, a view, a transform.

    It alone says whether this call acts. What it is for is handed on in every call, also where it finds nothing to do.
    """
    call = _current_call()
    if call is None:
        return Mark()
    if call.mark is None:
        call.mark = Mark()
    return call.mark


def _current_call() -> Call | None:
    """Return the innermost call of a wrapper that is under way in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in LAYER_CODES:
            call = frame.f_locals.get("call")
            return call if isinstance(call, Call) else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


LAYER_CODES: set[Any] = set()
"""The code of the functions that call wrappers. Each has the ``Call`` in a variable of that name."""

NOT_TRACED: tuple[Callable[..., Any], ...] = (Counts.of, Call.end, act, act_of_this_call, _current_call)
"""What Dynamo has nothing to do with. Of ``_current_call`` it would warn that it does not know ``sys._getframe``."""
