"""What a user sees without asking: one line for each patch that goes on, or that should and cannot."""

from __future__ import annotations

import functools
import logging
import os
import sys

log = logging.getLogger("trl_hotfix")


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
