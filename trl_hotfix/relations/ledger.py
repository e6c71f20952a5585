"""The ledger, ``relations.yaml``: each finding, a relation that does not hold, with its cause.

A finding is of some trainers, one relation and some of what its runs disagree about. Its cause is a patch, which
repairs it where it is on, a known bug without a repair, a difference that TRL documents or means, or a new bug.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..catalogue.checks import check_range
from ..catalogue.parsing import parse_entries
from ..errors import Mistake, suggestion
from ..matching.versions import in_range, installed
from .cells import ERROR, OF_TRL, ON_RECORD, VIOLATED
from .relations import RELATIONS
from .trainers import RECIPES

FILE = Path(__file__).parents[1] / "relations.yaml"
KINDS = ("patch", "known", "meant", "new")

VersionOf = Callable[[str], str | None]


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """What does not hold, where, and why.

    ``differs`` are beginnings of what two runs disagree about, such as ``gradient`` or ``rewards/``, or of the error of
    a run that fails, such as ``IndexError``. ``setting`` is a text that the claim has. ``trl`` and ``requires`` are
    ranges of versions. Exactly one of ``patch``, ``known``, ``meant`` and ``new`` is the cause: an id, or in ``meant``
    where TRL says that it is so, as ``file:line``.
    """

    relation: str
    trainers: tuple[str, ...]
    differs: tuple[str, ...]
    why: str
    setting: str = ""
    trl: str = ""
    requires: Mapping[str, str] = {}
    patch: str | None = None
    known: str | None = None
    meant: str | None = None
    new: str | None = None

    @property
    def cause(self) -> str:
        """Return the cause as one text, such as ``patch dpo-aux-loss-dropped``."""
        return next(f"{kind} {name}" for kind in KINDS if (name := getattr(self, kind)))

    def is_here(self, version_of: VersionOf) -> bool:
        """Return whether the versions are in its ranges."""
        ranges = {"trl": self.trl, **self.requires}
        versions = {name: version_of(name) for name in ranges}
        return all(
            not ranges[name] or (version and in_range(version, ranges[name])) for name, version in versions.items()
        )

    def explains(self, cell: Mapping[str, Any], what: str) -> bool:
        """Return whether it is of this cell and of this difference in it."""
        return (
            cell["trainer"] in self.trainers
            and cell["relation"] == self.relation
            and self.setting in cell["setting"]
            and what.removeprefix("evaluation: ").startswith(self.differs)
        )


@functools.cache
def load() -> tuple[Finding, ...]:
    """Return the findings on record. Raises ``CatalogueError``."""
    return parse(FILE.read_text(encoding="utf-8"), str(FILE))


def parse(text: str, path: str) -> tuple[Finding, ...]:
    """Return the findings of a text. Raises ``CatalogueError`` with every mistake in it."""
    findings: tuple[Finding, ...] = parse_entries(text, path, Finding, "finding", _mistakes)
    return findings


def _mistakes(finding: Finding, line_of: Callable[..., int]) -> Iterator[Mistake]:
    for names, known, key in (((finding.relation,), RELATIONS, "relation"), (finding.trainers, RECIPES, "trainers")):
        for name in names:
            if name not in known:
                yield Mistake(line_of(key), f"{key}: {name!r} is not known{suggestion(name, tuple(known))}")
    for key in ("trainers", "differs"):
        if not getattr(finding, key):
            yield Mistake(line_of(key), f"{key} is empty")
    for name, specifiers in {"trl": finding.trl, **finding.requires}.items():
        yield from check_range(specifiers, name, line_of("trl" if name == "trl" else "requires"))
    causes = [kind for kind in KINDS if getattr(finding, kind)]
    if len(causes) != 1:
        found = " and ".join(causes) or "none"
        yield Mistake(line_of("relation"), f"expected one cause of {', '.join(KINDS)}; found {found}")


def here(findings: Sequence[Finding], version_of: VersionOf, *, on: bool) -> list[Finding]:
    """Return the findings of these versions. That of a patch is no cause where the patches are ``on``."""
    return [each for each in findings if each.is_here(version_of) and not (on and each.patch)]


def cause_of(cell: Mapping[str, Any], what: str, findings: Sequence[Finding]) -> Finding | None:
    """Return the finding that explains this difference in a cell, or None."""
    return next((finding for finding in findings if finding.explains(cell, what)), None)


def with_causes(cell: Mapping[str, Any], trainer: str, *, on: bool) -> dict[str, Any]:
    """Return a cell, as ``Cell.as_data`` has it, with the ``cause`` on record of each difference, or null.

    ``trainer`` is TRL's: what a user's own violates and TRL's does not has no cause here. If all have one, the cell is
    ``ON_RECORD``. A patch is no cause where the patches are ``on``.
    """
    findings = here(load(), installed, on=on)
    is_of_trl = cell["state"] == OF_TRL or cell["trainer"] == trainer
    differences = []
    for difference in cell["differences"]:
        finding = cause_of({**cell, "trainer": trainer}, difference["what"], findings) if is_of_trl else None
        differences.append({**difference, "cause": finding.cause if finding is not None else None})
    has_all = cell["state"] == VIOLATED and all(each["cause"] for each in differences)
    if cell["state"] == ERROR and is_of_trl:
        error = cause_of({**cell, "trainer": trainer}, cell["why"], findings)
        if error is not None:
            return {**cell, "state": ON_RECORD, "why": f"{cell['why']} ({error.cause})"}
    return {**cell, "state": ON_RECORD if has_all else cell["state"], "differences": differences}
