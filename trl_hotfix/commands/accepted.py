"""Accepted findings: what comments, pyproject.toml and ``--ignore`` accept, and what is wrong with these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TypedDict

import click

from ..model import Bug, Patch
from ..scanning.ignore_table import ignores_of, nearest
from ..scanning.ignores import Ignore, ignores_in, present_id

NO_FINDING = "no finding"
REVIEW_IS_DUE = "review is due"

with_ignores = click.option(
    "--ignore", "ignored", metavar="ID", multiple=True, help="Accept the findings of a bug. Several times if needed."
)


class IgnoreProblem(TypedDict):
    """An ignore that needs a change. ``problem`` is "no finding" or "review is due"; the second one fails the gate.

    ``file`` and ``line`` are null for ``--ignore``.
    """

    id: str
    problem: str
    file: str | None
    line: int | None
    reason: str
    review_by: str | None
    text: str


class Ignores:
    """The ignores of some files, with what each has accepted. Raises ``ScriptError`` for an unknown id."""

    def __init__(self, ids: Sequence[str], bugs: Iterable[Bug], shown: Iterable[Bug], today: date) -> None:
        self._known = names_of(bugs)
        self._shown = {bug.id for bug in shown}
        self._today = today
        self._of_options = [
            Ignore(present_id(name, self._known, "--ignore"), "--ignore", position="--ignore") for name in ids
        ]
        self._read: dict[Path, list[Ignore]] = {}
        self._tables: dict[Path, Path | None] = {}
        self._all: dict[Ignore, bool] = dict.fromkeys(self._of_options, False)

    def of_script(self, path: Path) -> dict[str, Ignore]:
        """Return the ignores that hold in a scanned file, by the id of the bug."""
        return self._noted([*self.of_project(path).values(), *ignores_in(path, self._known)])

    def of_project(self, path: Path) -> dict[str, Ignore]:
        """Return the ignores of the project that has a file, and those of the options."""
        folder = path.absolute().parent
        if folder not in self._tables:
            self._tables[folder] = nearest(folder)
        table = self._tables[folder]
        if table is not None and table not in self._read:
            self._read[table] = ignores_of(table, self._known)
        return self._noted([*self._of_options, *(self._read[table] if table is not None else ())])

    def _noted(self, ignores: list[Ignore]) -> dict[str, Ignore]:
        for ignore in ignores:
            self._all.setdefault(ignore, False)
        return {ignore.id: ignore for ignore in ignores}

    def accept(self, ignore: Ignore) -> None:
        """Note that an ignore has accepted a finding, and so have the others of the same bug."""
        for other in self._all:
            if other.id == ignore.id and other.file in ("", ignore.file):
                self._all[other] = True
        self._all[ignore] = True

    def problems(self) -> list[IgnoreProblem]:
        """Return the ignores without a finding, and those whose day of review has passed."""
        return [problem for ignore, used in self._all.items() for problem in self._problems_of(ignore, used)]

    def _problems_of(self, ignore: Ignore, used: bool) -> Iterator[IgnoreProblem]:
        if not used and ignore.id in self._shown:
            # Another file, which is not scanned now, may need an ignore of the project.
            rest = " in these files" if ignore.review_by is not None else "; take it out"
            yield _problem(ignore, NO_FINDING, f"the ignore of {ignore.id} has no finding{rest}")
        if ignore.review_by is not None and ignore.review_by < self._today:
            text = f"the ignore of {ignore.id} was due for review on {ignore.review_by} ({ignore.reason})"
            yield _problem(ignore, REVIEW_IS_DUE, text)


def names_of(bugs: Iterable[Bug]) -> dict[str, str]:
    """Return the present id of each bug by its former names and by itself."""
    known = {}
    for bug in bugs:
        known.update(dict.fromkeys(bug.formerly if isinstance(bug, Patch) else (), bug.id))
    return known | {bug.id: bug.id for bug in bugs}


def today() -> date:
    return date.today()


def _problem(ignore: Ignore, problem: str, text: str) -> IgnoreProblem:
    return {
        "id": ignore.id,
        "problem": problem,
        "file": ignore.file or None,
        "line": ignore.line if ignore.file else None,
        "reason": ignore.reason,
        "review_by": ignore.review_by.isoformat() if ignore.review_by is not None else None,
        "text": f"{ignore.place}: {text}",
    }


def is_due(problems: Iterable[IgnoreProblem]) -> bool:
    """Return whether the review of an ignore is due, which fails a gate."""
    return any(problem["problem"] == REVIEW_IS_DUE for problem in problems)
