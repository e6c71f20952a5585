"""What the scan finds in a file: the calls of trainers, and lines from which more trainers may be made."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..catalogue.conditions import Argument, Lookup


class Cells(tuple[int, ...]):
    """The lines at which the cells of a notebook begin. For a script it is empty."""

    __slots__ = ()

    def position(self, line: int) -> str:
        """Return "line 10", or "cell 3, line 2" in a notebook."""
        if not self:
            return f"line {line}"
        cell = bisect.bisect_right(self, line)
        return f"cell {cell}, line {line - self[cell - 1] + 1}"


NO_CELLS = Cells()


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """A call of a trainer. ``name`` is TRL's, without ``Trainer``; ``called`` is the name in the script.

    ``facts`` returns what the script shows of its model and its dataset, by the names of ``catalogue.facts``.
    """

    name: str
    called: str
    line: int
    argument: Lookup
    cells: Cells = NO_CELLS
    facts: Callable[[], Mapping[str, Argument]] = dict

    def position(self, line: int) -> str:
        """Return "line 10", or "cell 3, line 2" in a notebook."""
        return self.cells.position(line)


class Unseen(NamedTuple):
    """A line from which a trainer may be made, and why the text does not tell more of it."""

    line: int
    reason: str


class Unread(NamedTuple):
    """An argument of a script with its values, and why nothing reads it."""

    words: str
    reason: str


class Trainers(NamedTuple):
    """The trainers of a file, in its order, and what may be more of them. A notebook has ``cells``.

    ``unread`` has the arguments behind ``--`` that nothing in the file reads.
    """

    calls: list[TrainerCall]
    unseen: list[Unseen]
    cells: Cells = NO_CELLS
    unread: Sequence[Unread] = ()
