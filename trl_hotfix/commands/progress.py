"""A line of progress on standard error, for what takes more than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE = 2.0
"""So many seconds pass before there is a line."""


@contextmanager
def progress(title: str, total: int, console: Console | None = None) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that takes the number of what is done, and what is next. Only a terminal has a line."""
    console = console or Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[on]}", markup=False))
    line = Progress(TextColumn(title), *columns, console=console, transient=True)
    task = line.add_task(title, total=total, on="")
    is_shown = console.is_terminal and not console.no_color
    begin = time.monotonic()

    def advance(completed: int, on: str) -> None:
        line.update(task, completed=completed, on=on)
        if is_shown and time.monotonic() - begin >= PATIENCE:
            line.start()

    try:
        yield advance
    finally:
        if line.live.is_started:
            line.stop()
