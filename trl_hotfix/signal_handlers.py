"""Tell an exception of a signal handler from one of the code that was running.

A handler of the program, such as one for SIGTERM that calls ``sys.exit``, runs inside whatever code is running. To
swallow what it raises would keep a process alive that somebody wants to end.
"""

from __future__ import annotations

import functools
import signal
import traceback
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType
from typing import Any


def has_raised(error: BaseException) -> bool:
    """Return whether a signal handler is among the frames that raised ``error``."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {code_of(handler) for handler in handlers if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def code_of(function: Any) -> CodeType | None:
    """Return the code that a call of ``function`` runs first, or None if it is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, (FunctionType, MethodType)):
        function = getattr_static(type(function), "__call__", None)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None
