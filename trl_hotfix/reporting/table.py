"""Reports and other views in a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..catalogue import evidence
from ..model import State
from .report import Report
from .sentences import because

_COLOURS = {
    State.APPLIED: "green",
    State.PENDING: "green",
    State.FAILED: "bold red",
    State.CONFLICTED: "bold red",
    State.DISPLACED: "bold red",
}


def table(report: Report, *, not_repaired: bool = False) -> Table:
    """Return a table of every patch: what it repairs, and whether it applies here.

    With ``not_repaired`` the table also has what each patch leaves as it is.
    """
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    # An id is to be copied, and never folded. With `min_width` rich makes the others too wide for the terminal.
    longest = max((len(each.id) for each in report), default=0)
    view.add_column("patch, what it repairs", overflow="fold", width=max(longest, int(0.45 * _width())))
    view.add_column("TRL range, evidence", overflow="fold")
    view.add_column(f"here: TRL {report.trl or 'none'}", overflow="fold")
    for each in report:
        applies = {State.PENDING: "applies", State.APPLIED: "applied"}.get(each.state, "does not apply")
        answer = Text(f"{applies}: {because(each.reason, each.evidence)}", style=_COLOURS.get(each.state, "dim"))
        # Text, not rich's markup: a cell may start with a bracket.
        what = Text.assemble((each.id, "bold"), f"\n{each.patch.severity.value}: {each.patch.title}")
        if not_repaired and each.patch.not_repaired:
            what.append(f"\nnot repaired: {each.patch.not_repaired}", style="dim")
        view.add_row(what, Text(f"{each.patch.trl}\n{evidence.in_words(each.patch)}"), answer)
    return view


def show(view: Any) -> None:
    """Print a rich view: coloured and folded in a terminal, plain and not cut where output is piped."""
    console = Console(emoji=False)
    if console.is_terminal:
        console.print(view)
        return
    console = Console(width=_width(), no_color=True, emoji=False)
    with console.capture() as captured:
        console.print(view)
    # rich fills each line of a table up to the whole width.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _width() -> int:
    """Of what is printed: the terminal's, or so much that little is folded."""
    console = Console()
    return console.width if console.is_terminal else 200
