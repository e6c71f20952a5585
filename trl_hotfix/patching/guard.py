"""A wrapper that has been proven cannot end the run any more.

If it fails before it has called TRL's method, or after it has called it once with the very arguments that it was given,
what TRL does unpatched is still to be had: that is done from then on, with one warning. What TRL's method made of other
arguments is neither the old behaviour nor the new one: then the error goes on to the caller, with a line that names the
patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..log import log
from ..model import Wrapper


class Guard:
    """The wrapper of one patch. ``armed`` once it is proven; ``broken`` is the error that has switched it off."""

    __slots__ = ("armed", "broken", "patch_id", "wrapper")

    def __init__(self, patch_id: str, wrapper: Wrapper) -> None:
        self.patch_id, self.wrapper = patch_id, wrapper
        self.armed = False
        self.broken: Exception | None = None

    def __call__(
        self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.broken is not None:
            return wrapped(*args, **kwargs)
        if not self.armed:
            return self.wrapper(wrapped, instance, args, kwargs)
        seen = _CallRecorder(wrapped)
        try:
            return self.wrapper(seen, instance, args, kwargs)
        # The third border: what goes wrong in a wrapper of ours must not end a run that goes on without it.
        except Exception as error:
            if seen.raised:
                raise  # TRL's own error, or that of the user's code which it calls
            what = f"{self.patch_id} failed in a call ({type(error).__name__}: {error})"
            if not seen.as_given(args, kwargs):
                log.error("%s after TRL had done part of it; TRL_HOTFIX_SKIP=%s leaves it out", what, self.patch_id)
                raise
            self.broken = error
            log.warning("%s and is NOT on any more: from this call on TRL runs unpatched", what)
            return seen.result if seen.calls else wrapped(*args, **kwargs)


class _CallRecorder:
    """TRL's method as a wrapper is given it: remembers how it was called and what came of it."""

    # Without slots: Dynamo, which traces this where the caller is compiled, does not find what stands in one that has a
    # ``__getattr__``, and asks that for it without end.

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self.__wrapped__ = wrapped
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.raised = False
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        try:
            self.result = self.__wrapped__(*args, **kwargs)
        except BaseException:
            self.raised = True
            raise
        return self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def as_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Was it called never, or once with these very objects?"""
        if len(self.calls) != 1:
            return not self.calls
        ours, named = self.calls[0]
        positional = len(ours) == len(args) and all(one is other for one, other in zip(ours, args, strict=True))
        return positional and named.keys() == kwargs.keys() and all(named[key] is kwargs[key] for key in kwargs)
