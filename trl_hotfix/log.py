"""What a user sees of it without asking: one line for each patch that goes on, or that should and cannot."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from .model import Decision

log = logging.getLogger("trl_hotfix")


def in_one_line(decision: Decision) -> str:
    """The evidence of a decision in one line; a traceback stays for ``status()``."""

    def short(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{key}={short(each)}" for key, each in value.items())
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    shown = {key: value for key, value in decision.evidence.items() if key != "traceback"}
    if isinstance(red := shown.get("red"), Mapping) and isinstance(green := shown.get("green"), Mapping):
        changed = {key: value for key, value in green.items() if red.get(key) != value}
        shown = {"before": red, "after": changed}
    return "".join(f"; {key}: {short(value)}" for key, value in shown.items())


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error, unless the program has set up logging itself; says which rank speaks when there are several."""

    def __init__(self) -> None:
        super().__init__()
        rank = os.environ.get("RANK")
        # Into a format string, so nothing but a number.
        who = f"trl_hotfix [rank {rank}]" if rank and rank.isdecimal() else "trl_hotfix"
        self.setFormatter(logging.Formatter(f"{who}: %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


@functools.cache
def ensure_handler() -> None:
    """What was patched must be seen without a line of logging set-up in the user's program."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(_FallbackHandler())
