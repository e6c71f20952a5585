"""Show the results of self-tests and proofs to a reader, with what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..reporting.lines import width
from ..reporting.table import NARROW, block

GOOD = ("proven", "absent", "not-run")


class CellAnswer(TypedDict):
    """The result of a patch's self-tests: the verdict and the numbers for each module and each run."""

    patch: str
    revision: int
    trl: str
    verdict: str
    why: str
    leaves: dict[str, dict[str, Any]]
    bodies: dict[str, str | None]


class ProofAnswer(TypedDict):
    """The result of a patch's proof: tiny models trained without the patch, with it, and without it again."""

    patch: str
    verdict: str
    why: str
    runs: dict[str, dict[str, Any]]


def verdicts(cells: Sequence[CellAnswer], why_absent: Mapping[str, str]) -> RenderableType:
    """Return the results of the self-tests. ``why_absent`` has the word of the gates, by patch."""
    rows = [
        [
            (module, run, result["verdict"], _numbers(result))
            for module, runs in cell["leaves"].items()
            for run, result in runs.items()
        ]
        for cell in cells
    ]
    view = _view(("patch", "verdict", "module", "run", "self-test says", "numbers"), cells, rows)
    notes = [_absent(cell, why_absent[cell["patch"]]) for cell in cells if cell["verdict"] == "absent"]
    moving = [note for cell in cells for note in _moving(cell["patch"], cell["leaves"].values())]
    return Group(view, *(block(note, 0) for note in [*notes, *moving]))


def losses(proofs: Sequence[ProofAnswer]) -> RenderableType:
    """Return the results of the proofs."""
    rows = [[(run, result["verdict"], _numbers(result)) for run, result in proof["runs"].items()] for proof in proofs]
    view = _view(("patch", "trained", "run", "says", "numbers"), proofs, rows)
    notes = [note for proof in proofs for note in _moving(proof["patch"], [proof["runs"]])]
    return Group(view, *(block(note, 0) for note in notes))


def _absent(cell: CellAnswer, why: str) -> str:
    """Return in a sentence what it means that a bug is absent."""
    ran = any(cell["leaves"].values())
    means = "The self-test ran on TRL's own code and found nothing to repair." if ran else f"{cell['why']}."
    return f"{cell['patch']} is absent here: {why}. {means}"


def _moving(patch_id: str, of_modules: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return a sentence if another number is right for one run of a module than for another."""
    numbers = [{_short(run["right"]) for run in runs.values() if run.get("right") is not None} for runs in of_modules]
    if all(len(right) < 2 for right in numbers):
        return []
    return [
        f"{patch_id}: `right` is what the run of its row should have given, with its own data, weights and number of "
        "items that the loss is divided by. Where the patch changes these, `right` changes too."
    ]


def _view(
    columns: Sequence[str],
    answers: Sequence[CellAnswer | ProofAnswer],
    rows: Sequence[Sequence[tuple[str, ...]]],
) -> RenderableType:
    """Return a table. In a narrow terminal it is a list, since a table would break the ids."""
    if width() < NARROW:
        return Group(
            *(line for answer, of_answer in zip(answers, rows, strict=True) for line in _block(answer, of_answer))
        )
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        view.add_column(column, overflow="fold")
    for answer, of_answer in zip(answers, rows, strict=True):
        _add(view, answer, of_answer)
    return view


def _block(answer: CellAnswer | ProofAnswer, rows: Sequence[tuple[str, ...]]) -> Iterator[RenderableType]:
    yield block(answer["patch"], 2, style="bold")
    verdict, colour = _verdict(answer)
    yield block(verdict, 6, colour)
    for row in rows:
        yield block(" ".join(row), 6, hanging=2)


def _verdict(answer: CellAnswer | ProofAnswer) -> tuple[str, str]:
    """Return the verdict with its reason, and its colour."""
    colour = "green" if answer["verdict"] in GOOD else "bold red"
    return ": ".join(filter(None, (answer["verdict"], answer["why"]))), colour


def _add(view: Table, answer: CellAnswer | ProofAnswer, rows: Sequence[tuple[str, ...]]) -> None:
    """Add the rows of one patch. The first has its name and its verdict."""
    verdict, colour = _verdict(answer)
    head = [Text(answer["patch"]), Text(verdict, style=colour)]
    for row in rows or [()]:
        view.add_row(*head, *map(Text, row))
        head = [Text(""), Text("")]


def _numbers(result: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_short(value)}" for key, value in result.items() if key != "verdict" and value is not None)


def _short(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)
