"""Show why ``import trl`` was stopped: the message alone, and exit code 2, if nobody catches the error.

The error is an ordinary exception, and no ``SystemExit``: pytest and a notebook show an exception, and a pool hands it
to the process that asked. It is no ``ImportError`` either, which code that can do without TRL would catch. Code
that catches it has no TRL: the next import raises it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .errors import HotfixError
from .settings import tell

EXIT_CODE = 2
"""That of a command for wrong usage."""

WAY_ON = "trl is not imported. Correct the setting, or set TRL_HOTFIX=0 to run without repairs."

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def stopped(error: Exception) -> None:
    """Add the way on to the message of an error that stops the import, and have it shown alone if nobody catches it."""
    error.args = (f"{error}\n{WAY_ON}",)
    if not isinstance(sys.excepthook, _MessageAlone):
        sys.excepthook = _MessageAlone(sys.excepthook)


class _MessageAlone:
    """Shows an error of a setting as its message, and leaves every other one to the hook that was there."""

    def __init__(self, other: _Hook) -> None:
        self._other = other

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not (isinstance(error, HotfixError) and error.stops_import):
            self._other(kind, error, traceback)
            return
        tell("ERROR", str(error), "stopped", error=kind.__name__, exit_code=EXIT_CODE)
        if not (hasattr(sys, "ps1") or sys.flags.inspect):
            # Python ends with the code of a SystemExit that this hook raises. At a prompt it must not end.
            raise SystemExit(EXIT_CODE)
