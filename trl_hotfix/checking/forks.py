"""Runs of the user's script: forks of the process that stands before the constructor of its trainer."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..relations.run import Run
from .variant import Variant

SECONDS = 180.0
"""The limit for one run."""


@dataclass
class Outcome:
    """The result of a run. ``error`` is empty if it trained to its last step.

    ``facts`` describe the trainer, ``notes`` what a run found out while it trained, and ``trace`` what each module
    computed in the first step, by name, with the columns of its batches first.
    """

    run: Run = field(default_factory=Run)
    error: str = ""
    where: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class InFork(BaseException):
    """Raised in a new fork, to leave what only the first process does. It reaches no code of the user."""

    def __init__(self, variant: Variant, out: Path) -> None:
        super().__init__()
        self.variant, self.out = variant, out


class Runs:
    """The runs of a script, each once."""

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self._folder, self._seconds = folder, seconds
        self._known: dict[Variant, Outcome] = {}

    def of(self, variant: Variant) -> Outcome:
        """Return the result of a run. Raises ``InFork`` in the process that is the run."""
        if variant not in self._known:
            self._known[variant] = self._forked(variant)
        return self._known[variant]

    def __len__(self) -> int:
        return len(self._known)

    def _forked(self, variant: Variant) -> Outcome:
        begin = time.monotonic()
        out = self._folder / f"run-{len(self._known)}"
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if not process:
            raise InFork(variant, out)
        code = _waited(process, begin + self._seconds)
        if code is None:
            return Outcome(error=f"a run takes more than {self._seconds:.0f} s")
        if not out.is_file():
            return Outcome(error=f"the run ended with code {code} and says nothing")
        outcome: Outcome = pickle.loads(out.read_bytes())
        out.unlink()
        outcome.seconds = time.monotonic() - begin
        return outcome


def _waited(process: int, until: float) -> int | None:
    """Return the exit code of a process, or None if it was killed at the time limit."""
    pause = 0.005
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def write(outcome: Outcome, out: Path) -> None:
    """Write the result of this run, and end this process without the exit handlers of its parent."""
    beside = out.with_suffix(".writing")
    beside.write_bytes(pickle.dumps(outcome))
    beside.rename(out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
