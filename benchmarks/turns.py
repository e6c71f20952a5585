"""Trainings that take turns in one process, one step each.

Two processes differ by more than the patches do, and so do the first and the second half of a minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Runner:
    """A training that waits before each step until it is its turn."""

    train: Callable[[Runner], Any]
    results: dict[str, Any] = field(default_factory=lambda: {"step_ms": [], "step_cpu_ms": []})

    def __post_init__(self) -> None:
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.results |= self.train(self)
        # It is raised again in the main thread.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        self._waits.release()

    def turn(self) -> None:
        """Let it go on until its next step begins, or it has ended. Raises what it has raised."""
        self._go.release()
        self._waits.acquire()
        if self._error is not None:
            raise self._error

    def step_begins(self) -> None:
        self._waits.release()
        self._go.acquire()
        self._begin = time.perf_counter(), time.process_time()

    def step_ends(self) -> None:
        for name, begin, end in zip(self.results, self._begin, (time.perf_counter(), time.process_time()), strict=True):
            self.results[name].append((end - begin) * 1e3)
