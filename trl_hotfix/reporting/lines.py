"""Fold text for a terminal between words: an id, a path or a value is never cut, since it must be easy to copy."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

import click

from ..errors import SHOWN, printable

WITHOUT_TERMINAL = 200
"""At this width little is folded."""


def folded(text: str, width: int, indent: int = 0, hanging: int = 0) -> list[str]:
    """Fold a text into lines. Lines after the first are indented by ``hanging`` more. A very long text is cut."""
    space = " " * indent
    return textwrap.wrap(
        printable(text, SHOWN),
        max(width, 20),
        initial_indent=space,
        subsequent_indent=space + " " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [space.rstrip()]


def width(*, err: bool = False) -> int:
    """Return the width of the terminal, or that of COLUMNS, or else a width at which little is folded."""
    stream = sys.stderr if err else sys.stdout
    told = os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size((80, 24)).columns if told or stream.isatty() else WITHOUT_TERMINAL


def say(text: str, *, err: bool = False) -> None:
    """Print a text that the user reads. In a pipe a line is left as long as it is."""
    columns = width(err=err)
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        shown = (
            [printable(line, SHOWN)] if columns == WITHOUT_TERMINAL else folded(line.lstrip(" "), columns, indent, 2)
        )
        click.echo("\n".join(shown), err=err)
