"""Cells: a relation in a pair of settings, asked of one trainer."""

from __future__ import annotations

import math
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .claims import Claim
from .compare import Difference
from .recipes import Make
from .run import Run, run
from .setting import CannotBeAskedError, Setting

HOLDS, VIOLATED, OF_TRL, UNASKED, ERROR = "holds", "violated", "violated by TRL too", "cannot be asked", "error"
ON_RECORD = "violated, cause on record"
"""The ledger has a cause for all that a trainer of TRL violates, or for the error of its run."""


@dataclass(frozen=True)
class Cell:
    """What came of a claim, and of a user's trainer whether TRL's own violates it too. ``why`` has the reason."""

    trainer: str
    relation: str
    setting: str
    state: str
    why: str = ""
    differences: tuple[Difference, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON can hold it: a number that is not finite becomes null."""
        return {**asdict(self), "differences": [_finite(asdict(difference)) for difference in self.differences]}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    infinite = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in infinite else value for name, value in values.items()}


class FailedRunError(Exception):
    """A run failed. ``args`` has the error as a text: what it raised would keep its trainer and its models."""


class Runs:
    """The runs of one trainer. A setting that several pairs have is run once."""

    def __init__(self, make: Make, folder: Path) -> None:
        self._make, self._folder = make, folder
        self._known: dict[str, Run | CannotBeAskedError | FailedRunError] = {}

    def of(self, setting: Setting) -> Run:
        """Return the run in a setting. Raises ``CannotBeAskedError`` and ``FailedRunError``."""
        key = repr(setting)
        if key not in self._known:
            self._known[key] = self._run(setting)
        known = self._known[key]
        if isinstance(known, Exception):
            raise known.with_traceback(None)
        return known

    def _run(self, setting: Setting) -> Run | CannotBeAskedError | FailedRunError:
        try:
            return run(self._make, setting, self._folder / "run")
        except CannotBeAskedError as error:
            return CannotBeAskedError(str(error))
        # TRL may raise anything. The cell says what it was.
        except Exception as error:  # noqa: BLE001
            return FailedRunError(_described(error))


def _described(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


def asked(trainer: str, relation: str, claim: Claim, runs: Runs, of_trl: Runs | None = None) -> Cell:
    """Return the cell of a claim.

    ``of_trl`` are the runs of the trainer that a user's own inherits from. What it violates is not the user's fault.
    """
    cell = _judged(trainer, relation, claim, runs)
    if of_trl is not None and cell.state == VIOLATED:
        return _without(cell, _judged(trainer, relation, claim, of_trl))
    return cell


def _judged(trainer: str, relation: str, claim: Claim, runs: Runs) -> Cell:
    try:
        found = tuple(claim.violations(runs.of))
    except CannotBeAskedError as error:
        return Cell(trainer, relation, str(claim), UNASKED, str(error))
    except FailedRunError as error:
        return Cell(trainer, relation, str(claim), ERROR, str(error))
    # Two runs may not be comparable, such as tensors of other shapes.
    except Exception as error:  # noqa: BLE001
        return Cell(trainer, relation, str(claim), ERROR, _described(error))
    return Cell(trainer, relation, str(claim), VIOLATED if found else HOLDS, "", found)


def _without(cell: Cell, of_trl: Cell) -> Cell:
    """Return the cell with what the trainer of TRL does not violate alike."""
    known = {difference.what for difference in of_trl.differences}
    own = tuple(difference for difference in cell.differences if difference.what not in known)
    return replace(cell, differences=own) if own else replace(cell, state=OF_TRL)
