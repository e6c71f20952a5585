"""Annotations of a pull request: the workflow commands of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

import click

from ..errors import SHOWN, shortened
from .accepted import REVIEW_IS_DUE, IgnoreProblem


def annotate(level: str, file: str, line: int, title: str, message: str) -> None:
    """Print an annotation. ``level`` is error, warning or notice."""
    properties = {"file": PurePath(file).as_posix(), "line": str(line), "title": title}
    written = ",".join(f"{name}={_escaped(value, in_property=True)}" for name, value in properties.items())
    click.echo(f"::{level} {written}::{_escaped(shortened(message, SHOWN))}")


def annotate_ignores(problems: Iterable[IgnoreProblem], path: str) -> None:
    """Print the ignores that need a change. One of ``--ignore`` is shown at ``path``."""
    for problem in problems:
        level = "error" if problem["problem"] == REVIEW_IS_DUE else "warning"
        place = problem["file"] or path, problem["line"] or 1
        annotate(level, *place, f"{problem['id']}: {problem['problem']}", problem["text"])


def _escaped(text: str, *, in_property: bool = False) -> str:
    for character, code in {"%": "%25", "\r": "%0D", "\n": "%0A"}.items():
        text = text.replace(character, code)
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text
