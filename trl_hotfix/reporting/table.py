"""Show reports and other views in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..catalogue import evidence
from ..model import State
from .report import Report
from .sentences import because

_COLOURS = {
    State.APPLIED: "green",
    State.PENDING: "green",
    State.OBSERVED: "yellow",
    State.FAILED: "bold red",
    State.CONFLICTED: "bold red",
    State.DISPLACED: "bold red",
}


def bug_block(answer: Text, bug_id: str, symptom: str, reasons: str) -> Iterator[RenderableType]:
    """Yield the id on a line of its own, so that it is never cut, and what happens and why below it."""
    yield Padding(Text.assemble(answer, "  ", (bug_id, "bold")), (0, 0, 0, 2))
    yield Padding(Text(symptom), (0, 0, 0, 6))
    yield Padding(Text(reasons, style="dim"), (0, 0, 0, 6))


def table(report: Report, *, not_repaired: bool = False) -> Table:
    """Return a table of every patch: what it repairs, and whether it applies here.

    With ``not_repaired`` the table also has what each patch leaves as it is.
    """
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    # An id must be easy to copy, so it is never folded. `min_width` would make rich's other columns too wide.
    longest = max((len(status.id) for status in report), default=0)
    view.add_column("patch, what it repairs", overflow="fold", width=max(longest, int(0.45 * _width())))
    view.add_column("TRL range, evidence", overflow="fold")
    view.add_column(f"here: TRL {report.trl or 'none'}", overflow="fold")
    for status in report:
        patch, state = status.patch, status.state
        applies = {State.PENDING: "applies", State.APPLIED: "applied", State.OBSERVED: "observed"}.get(
            state, "does not apply"
        )
        answer = Text(f"{applies}: {because(status.reason, status.evidence)}", style=_COLOURS.get(state, "dim"))
        # A cell may start with a bracket, which rich would read as markup in a plain string.
        title = Text.assemble((patch.id, "bold"), f"\n{patch.severity.value}: {patch.title}")
        if not_repaired and patch.not_repaired:
            title.append(f"\nnot repaired: {patch.not_repaired}", style="dim")
        view.add_row(title, Text(f"{patch.trl}\n{evidence.in_words(patch)}"), answer)
    return view


def show(view: Any) -> None:
    """Print a rich view: coloured and folded in a terminal, plain and not cut in a pipe or a file."""
    console = Console(emoji=False)
    if console.is_terminal:
        console.print(view)
        return
    console = Console(width=_width(), no_color=True, emoji=False)
    with console.capture() as captured:
        console.print(view)
    # rich fills each line of a table with spaces up to the full width.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _width() -> int:
    """Return the width of the terminal, or a width without a terminal at which little is folded."""
    console = Console()
    return console.width if console.is_terminal else 200
