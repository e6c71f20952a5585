"""The log: how many repairs are on, which bugs a run hits, what it repaired, and what should be on and is not.

``TRL_HOTFIX_LOG`` chooses how much of it. ``quiet`` has warnings alone. ``summary``, the default, also has a line for
each trainer and for each bug that a run hits, on rank 0. ``full`` also has a line for each repair, with the numbers of
its self-test. Under ``TRL_HOTFIX_LOG_FORMAT=json`` each line is an object, for collectors.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from .errors import printable
from .settings import FORMAT_CHOICES, LOG, LOG_CHOICES, LOG_FORMAT, choice, json_line, rank, warn
from .standard_error import BesideBars

log = logging.getLogger("trl_hotfix")

LONGEST_LINE = 8000
"""So many characters of a line are in the log. The text of an error of other code can be of any length."""

FIELDS = "trl_hotfix"
"""The attribute of a log record with the fields of its event, for the formatters of programs and for JSON."""
MESSAGE = "message"
"""The event of a line that names none, such as what a patch says in a call."""

HEARD = {"trl_hotfix_heard": True}
"""The ``extra`` of a line that is written also if a self-test is the cause of it."""

_self_tests: Counter[int] = Counter()
"""The threads that run a self-test, and how many, one within the other."""

_LEVELS = {"quiet": logging.WARNING, "summary": logging.INFO, "full": logging.DEBUG}


class _Logger(type(log)):  # type: ignore[misc]
    """A logger that ``dictConfig`` and ``fileConfig`` do not disable, and whose lines are safe in a terminal.

    By default they disable every logger that exists and that they do not name, which few who call them know, and then
    nobody would hear that a patch is not on any more. The log obeys a level, a handler and a filter that a program
    sets, and also ``logging.disable`` and ``disabled = True`` itself.
    """

    @property
    def disabled(self) -> bool:
        return bool(vars(self).get("disabled", False))

    @disabled.setter
    def disabled(self, value: bool) -> None:
        if not (value and sys._getframe(1).f_globals.get("__name__") == "logging.config"):
            self.__dict__["disabled"] = value

    def handle(self, record: logging.LogRecord) -> None:
        # Names, errors and records come from other code, from files and from other ranks.
        text = record.getMessage()
        shown = printable(text, LONGEST_LINE)
        if shown is not text:
            record.msg, record.args = shown, ()
        if not hasattr(record, FIELDS):
            setattr(record, FIELDS, {"event": MESSAGE})
        super().handle(record)

    def callHandlers(self, record: logging.LogRecord) -> None:
        if not _self_tests[record.thread or 0] or HEARD.keys() <= vars(record).keys():
            super().callHandlers(record)


log.__class__ = _Logger


def warning(text: str, *args: Any, extra: Mapping[str, Any] | None = None) -> None:
    """Log a warning of the engine or of the record.

    A self-test that records what its patch warns of has its own function at ``log.warning`` meanwhile.
    """
    log.log(logging.WARNING, text, *args, extra=extra, stacklevel=2)


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Write to standard error, unless the program has set up logging itself. With several ranks, name the rank.

    As JSON it writes in any case: a collector reads every process alike, whatever its program has set up.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__(BesideBars())
        self._as_json = as_json
        number = rank()
        prefix = f"trl_hotfix [rank {number}]" if number is not None else "trl_hotfix"
        self.setFormatter(_AsJson() if as_json else logging.Formatter(f"{prefix}: %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if self._as_json or not logging.getLogger().handlers:
            super().emit(record)


class _AsJson(logging.Formatter):
    """One object a line: time, level, logger, rank, pid, message, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, None)
        return json_line(record.levelname, record.getMessage(), fields if isinstance(fields, dict) else None)


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the ``extra`` of a line: the name of its event, and what programs may want of it without its words."""
    return {FIELDS: {"event": name, **fields}}


def level_of_repairs() -> int:
    """Return the level of what is the same on every rank: INFO on the first, and DEBUG on the others.

    Processes that ``multiprocessing`` starts, such as those that prepare data, do not count as the first.
    """
    if log.isEnabledFor(logging.DEBUG):
        return logging.INFO
    parent_process = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)
    return logging.INFO if rank() in (None, 0) and parent_process() is None else logging.DEBUG


@contextmanager
def quiet_wrappers() -> Iterator[None]:
    """Write nothing of what this thread's wrappers say: a self-test calls them, and not a run.

    The filters of the log have it all the same, and a self-test may look at it there.
    """
    thread = get_ident()
    _self_tests[thread] += 1
    try:
        yield
    finally:
        _self_tests[thread] -= 1


@functools.cache
def ensure_handler() -> None:
    """Make the log visible in a program that does not set up logging."""
    amount, form = _chosen(LOG, LOG_CHOICES, "summary"), _chosen(LOG_FORMAT, FORMAT_CHOICES, "text")
    if log.level == logging.NOTSET:
        log.setLevel(_LEVELS[amount])
    if form == "json":
        # The handlers of the program would write each line a second time, and not as JSON.
        log.addHandler(_FallbackHandler(as_json=True))
        log.propagate = False
    elif not log.handlers:
        log.addHandler(_FallbackHandler())


def _chosen(variable: str, choices: tuple[str, ...], default: str) -> str:
    value, known = choice(variable, choices, default)
    if not known:
        text = os.environ[variable][:80]
        warn(f"{variable}={text!r} is not one of {', '.join(choices)}; taken as {default}", "log-setting")
    return value
