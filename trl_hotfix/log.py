"""The log that a user sees by default: one line for each patch that goes on, or that should go on and cannot."""

from __future__ import annotations

import functools
import logging
import os
import sys

log = logging.getLogger("trl_hotfix")


class _NotDisabledByDefault(type(log)):  # type: ignore[misc]
    """A logger that ``dictConfig`` and ``fileConfig`` do not disable.

    By default they disable every logger that exists and that they do not name, which few who call them know, and then
    nobody would hear that a patch is not on any more. A level, a handler and a filter that a program sets are obeyed,
    as are ``logging.disable`` and ``disabled = True`` itself.
    """

    @property
    def disabled(self) -> bool:
        return bool(vars(self).get("disabled", False))

    @disabled.setter
    def disabled(self, value: bool) -> None:
        if not (value and sys._getframe(1).f_globals.get("__name__") == "logging.config"):
            self.__dict__["disabled"] = value


log.__class__ = _NotDisabledByDefault


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Write to standard error, unless the program has set up logging itself. With several ranks, name the rank."""

    def __init__(self) -> None:
        super().__init__()
        rank = os.environ.get("RANK")
        # The rank becomes part of a format string, so only a number is accepted.
        prefix = f"trl_hotfix [rank {rank}]" if rank and rank.isdecimal() else "trl_hotfix"
        self.setFormatter(logging.Formatter(f"{prefix}: %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


@functools.cache
def ensure_handler() -> None:
    """Make the log visible in a program that does not set up logging."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(_FallbackHandler())
