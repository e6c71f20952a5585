"""The process that runs the user's script until it makes its trainer, and forks there."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import owners
from .argument_classes import ArgumentClasses
from .forks import InFork, Runs
from .one_run import OneRun, arguments_of
from .variant import Variant


class NoTrainerError(Exception):
    """The script never made the trainer that we ask for. ``args`` says what it did."""


class Stem:
    """Runs a script, and calls ``ask(runs, trainer_class)`` once, just before the script makes its trainer."""

    def __init__(self, which: int, folder: Path, ask: Callable[[Runs, Any, str], None]) -> None:
        self._which, self._folder, self._ask = which, folder, ask
        self._count = 0
        self._run: OneRun | None = None
        self._reached = False
        self._runs = Runs(folder)
        self._configs = ArgumentClasses(
            lambda given, fields: arguments_of(Variant(), given, fields, str(folder / "output"))
        )

    def install(self) -> None:
        from transformers import Trainer

        self._configs.install()

        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            is_asked = not self._reached and self._configs.is_on and (args or kwargs)
            if is_asked and owners.is_trainer_of_trl(cls):
                self._count += 1
                if self._count == self._which:
                    self._reached = True
                    self._at_constructor(cls)
            return object.__new__(cls)

        Trainer.__new__ = staticmethod(new)

    def run(self, script: Path, arguments: Sequence[str]) -> None:
        """Run the script. Does not return if the script makes the trainer. Raises ``NoTrainerError``."""
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if self._run is None:
                raise NoTrainerError(f"the script ends with code {ended.code} before it makes a trainer") from ended
        except Exception as error:
            if self._run is None:
                raise
            self._run.failed(error)
        if self._run is not None:
            self._run.never_trained()
        made = f"{self._count} of TRL" if self._count else "none of TRL"
        raise NoTrainerError(f"the script ends and has made {made}")

    def _at_constructor(self, cls: Any) -> None:
        try:
            self._ask(self._runs, cls, _place())
        except InFork as begun:
            self._run = OneRun(begun.variant, begun.out, self._folder, self._configs)
            self._run.begin(cls)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _place() -> str:
    """Return the line of the script that makes the trainer."""
    frame = sys._getframe(3)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
