"""Cells: a relation in a pair of settings, asked of one trainer."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .compare import Difference, differences, unexpected
from .recipes import CannotBeAskedError, Make, Recipe, made
from .relations import Claim, Relation, Values
from .run import Run, run
from .setting import Setting

HOLDS, VIOLATED, OF_TRL, UNASKED, ERROR = "holds", "violated", "violated by TRL too", "cannot be asked", "error"


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


class Runs:
    """The runs of one trainer. A setting that several pairs have is run once."""

    def __init__(self, make: Make, folder: Path) -> None:
        self._make, self._folder = make, folder
        self._known: dict[str, Run | Exception] = {}

    def of(self, setting: Setting) -> Run:
        """Return the run in a setting. Raises what it raised."""
        key = repr(setting)
        if key not in self._known:
            try:
                self._known[key] = run(self._make, setting, self._folder / "run")
            # TRL may raise anything. The cell says what it was.
            except Exception as error:  # noqa: BLE001
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, Exception):
            raise known
        return known


def runs_of_trl(recipe: Recipe, folder: Path) -> Runs:
    """Return the runs of the trainer that a user's own inherits from."""
    return Runs(lambda setting, own: made(recipe, setting, own), folder)


def asked(trainer: str, recipe: Recipe, relation: Relation, runs: Runs, of_trl: Runs | None = None) -> Iterator[Cell]:
    """Give a cell for each claim of the relation.

    ``of_trl`` are the runs of the trainer that a user's own inherits from. What it violates is not the user's fault.
    """
    for claim in relation.claims(recipe):
        cell = judged(trainer, relation.name, claim, runs)
        if of_trl is not None and cell.state == VIOLATED:
            cell = _without(cell, judged(trainer, relation.name, claim, of_trl))
        yield cell


def judged(trainer: str, relation: str, claim: Claim, runs: Runs) -> Cell:
    """Return what comes of a claim."""
    try:
        found = tuple(_violations(claim, runs))
    except CannotBeAskedError as error:
        return Cell(trainer, relation, str(claim), UNASKED, str(error))
    # TRL may raise anything. The cell says what it was.
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return Cell(trainer, relation, str(claim), ERROR, why)
    return Cell(trainer, relation, str(claim), VIOLATED if found else HOLDS, "", found)


def _without(cell: Cell, of_trl: Cell) -> Cell:
    """Return the cell with what the trainer of TRL does not violate alike."""
    known = {difference.what for difference in of_trl.differences}
    own = tuple(difference for difference in cell.differences if difference.what not in known)
    return replace(cell, differences=own) if own else replace(cell, state=OF_TRL)


def _violations(claim: Claim, runs: Runs) -> Iterator[Difference]:
    if isinstance(claim, Values):
        return unexpected(runs.of(claim.setting), claim.numbers)
    return differences(runs.of(claim.left), runs.of(claim.right), claim.of)
