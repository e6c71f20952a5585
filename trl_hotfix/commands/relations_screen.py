"""Show a reader which relations hold, and by how much a trainer violates the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, TypedDict

from rich.console import Group, RenderableType
from rich.text import Text

from ..relations.cells import ERROR, HOLDS, VIOLATED
from ..relations.relations import RELATIONS
from ..reporting.table import block

_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")

SHOWN = 6
"""So many differences of a cell are shown. The JSON has all."""


class DifferenceAnswer(TypedDict):
    """What two runs disagree about. ``apart`` is relative to the larger number. A number that is not finite is null.

    ``cause`` is what the ledger of TRL's own violations has of it, such as ``patch dpo-aux-loss-dropped``, or null.
    """

    what: str
    left: float | None
    right: float | None
    apart: float | None
    cause: str | None


class CellAnswer(TypedDict):
    """A relation in a pair of settings, asked of one trainer."""

    trainer: str
    relation: str
    setting: str
    state: str
    why: str
    differences: list[DifferenceAnswer]


class Answer(TypedDict):
    """``patches``: whether those that apply were on."""

    trl_hotfix: str
    trl: str
    patches: bool
    cells: list[CellAnswer]


def view(answer: Answer) -> RenderableType:
    cells = answer["cells"]
    states = Counter(cell["state"] for cell in cells)
    counts = ", ".join(f"{count} {'hold' if state == HOLDS else state}" for state, count in states.most_common())
    with_patches = "with the patches" if answer["patches"] else "without the patches"
    return Group(
        *(line for name in RELATIONS for line in _relation(name, [cell for cell in cells if cell["relation"] == name])),
        block(f"TRL {answer['trl']}, {with_patches}: {len(cells)} claims: {counts or 'nothing was asked'}", 0),
    )


def _relation(name: str, cells: Sequence[CellAnswer]) -> Iterator[RenderableType]:
    failed = [cell for cell in cells if cell["state"] != HOLDS]
    if not failed:
        return
    yield Text.assemble((name, "bold"), f"  {RELATIONS[name].why}")
    for cell in failed:
        colour = {VIOLATED: "bold red", ERROR: "bold red"}.get(cell["state"], "yellow")
        yield Text.assemble("  ", (cell["state"], colour), f"  {cell['trainer']}")
        yield block(cell["setting"], 6)
        if cell["why"]:
            yield block(cell["why"], 6, style="dim")
        for difference in cell["differences"][:SHOWN]:
            left, right = (_number(difference[side]) for side in _SIDES)
            cause = f" ({difference['cause']})" if difference["cause"] else ""
            yield block(f"{difference['what']}: {left} and {right}{cause}", 6)
        if len(cell["differences"]) > SHOWN:
            yield block(f"and {len(cell['differences']) - SHOWN} more", 6, style="dim")
    yield Text()


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.5g}"
