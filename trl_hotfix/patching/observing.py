"""A function that counts its calls, and is TRL's function otherwise, for a patch that is observed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..errors import described_error, text_of
from ..log import event, warning
from ..witness import Here, Witnessed, elsewhere
from .breaker import Breaker


def observing(
    raw: FunctionType, witnessed: Witnessed, breaker: Breaker, *, bound: bool, in_process: bool
) -> Callable[..., Any]:
    """Return a function that counts its calls, and calls ``raw``.

    Dynamo sees ``raw`` alone, and compiles what it would without us. ``bound`` is for a method,
    ``in_process`` for one whose calls belong to the process.
    """
    compiling = is_compiling()

    def count(instance: Any) -> None:
        try:
            doing = Here.thread.doing
            (doing if instance is None or doing.key == id(instance) else elsewhere(instance)).of(witnessed).called += 1
        # What is only observed goes on whatever happens here, such as an instance that cannot be held weakly.
        except Exception as error:  # noqa: BLE001
            breaker.broken, breaker.error = True, described_error(error)
            fields, text = event("not-observed", patch=breaker.patch_id), text_of(error)
            warning("we no longer observe %s: we cannot count a call (%s)", breaker.patch_id, text, extra=fields)

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not compiling() and not breaker.broken:
            count(None if in_process else self)
        return raw(self, *args, **kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        if not compiling() and not breaker.broken:
            count(None)
        return raw(*args, **kwargs)

    async def async_method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await method(self, *args, **kwargs)

    async def async_function(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    if inspect.iscoroutinefunction(raw):
        return async_method if bound else async_function
    return method if bound else function


def is_compiling() -> Callable[[], bool]:
    """Return torch's function that is true while Dynamo traces the caller."""
    compiler: Any = sys.modules.get("torch.compiler")
    # A lambda would be one more function for Dynamo to trace.
    return getattr(compiler, "is_compiling", bool)
