"""Show reports and other views in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..catalogue import on_record
from ..errors import printable
from ..model import Reason, State
from .lines import folded, width
from .report import PatchStatus, Report
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
    yield block(symptom, 6)
    yield block(reasons, 6, style="dim")


def block(text: str, indent: int, style: str = "", hanging: int = 0) -> Text:
    """Return a text with an indentation, folded between words."""
    lines = folded(text, width(), indent, hanging)
    return Text("\n".join(lines), style=style, no_wrap=True, overflow="ignore")


def facts(rows: Sequence[tuple[str, str]]) -> Group:
    """Return a line for each pair of a name and what it is, which are longer below each other."""
    longest = max((len(name) for name, _ in rows), default=0)
    return Group(*(block(f"{name:<{longest}}  {value}", 0, hanging=longest + 2) for name, value in rows))


NARROW = 100
"""With fewer columns a table would break versions in two, and would be some letters wide beside the ids."""


def table(report: Report, *, not_repaired: bool = False) -> RenderableType:
    """Return a table of every patch: what it repairs, and whether it applies here. In a narrow terminal it is a list.

    With ``not_repaired`` it also has what each patch leaves as it is.
    """
    if width() < NARROW:
        return Group(*(line for status in report for line in _block(status, not_repaired)), Text())
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    # An id must be easy to copy, so it is never folded. `min_width` would make rich's other columns too wide.
    longest = max((len(status.id) for status in report), default=0)
    view.add_column("patch, what it repairs", overflow="fold", width=max(longest, int(0.45 * width())))
    view.add_column("TRL range, evidence", overflow="fold")
    view.add_column(f"here: TRL {report.trl or 'none'}", overflow="fold")
    for status in report:
        # A cell may start with a bracket, which rich would read as markup in a plain string.
        what = [Text(text, style=style) for text, style in _what(status, not_repaired)]
        title = Text("\n").join([Text(status.id, style="bold"), *what])
        view.add_row(title, Text(f"{status.patch.trl}\n{on_record.in_words(status.patch)}"), Text(*_answer(status)))
    return view


def _block(status: PatchStatus, not_repaired: bool) -> Iterator[RenderableType]:
    """Yield the lines of one patch for a narrow terminal, with the id on a line of its own."""
    patch = status.patch
    yield Padding(Text(patch.id, style="bold"), (0, 0, 0, 2))
    of_releases = f"TRL {patch.trl}; {on_record.in_words(patch)}"
    for text, style in (*_what(status, not_repaired), (of_releases, ""), _answer(status)):
        yield block(text, 6, style)


def _what(status: PatchStatus, not_repaired: bool) -> Iterator[tuple[str, str]]:
    patch = status.patch
    yield f"{patch.severity.value}: {patch.title}", ""
    if not_repaired and patch.not_repaired:
        yield f"not repaired: {patch.not_repaired}", "dim"


def _answer(status: PatchStatus) -> tuple[str, str]:
    """Return whether the patch applies here, and why, and the style of this answer."""
    words = {State.PENDING: "applies", State.APPLIED: "applied", State.OBSERVED: "observed"}
    word = "may apply" if status.reason is Reason.BODY_DECIDES else words.get(status.state, "does not apply")
    text = f"{word}: {because(status.reason, status.evidence)}"
    return text, _COLOURS.get(status.state, "dim")


def show(view: Any) -> None:
    """Print a rich view: coloured in a terminal, and plain in a pipe, a file, or with NO_COLOR. Nothing is cut."""
    # rich joins a text that is alone with others, and forgets then that its lines are not to be folded.
    view = Group(view)
    console = Console(emoji=False)
    if console.is_terminal and not console.no_color:
        console.print(view, crop=False)
        return
    # Without a colour system there is no code for bold letters either.
    console = Console(width=width(), color_system=None, force_terminal=False, emoji=False)
    with console.capture() as captured:
        console.print(view, crop=False)
    # rich fills each line of a table with spaces up to the full width.
    print("\n".join(printable(line.rstrip()) for line in captured.get().split("\n")).removesuffix("\n"))
