"""Compare answers with ``trl_hotfix/relations.yaml``: each violation has a cause there, and each finding is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trl_hotfix.relations import ledger
from trl_hotfix.relations.cells import ERROR
from trl_hotfix.relations.ledger import Finding

from bench.releases.layout import Place

Answer = Mapping[str, Any]


class Open(NamedTuple):
    """A violation without a cause on record."""

    place: str
    on: bool
    trainer: str
    relation: str
    setting: str
    what: str
    left: float | None
    right: float | None

    def __str__(self) -> str:
        on = "on" if self.on else "off"
        numbers = " and ".join("none" if side is None else f"{side:.5g}" for side in (self.left, self.right))
        return f"{self.place} {on} {self.trainer} {self.relation}: {self.setting}: {self.what}: {numbers}"


def without_cause(answers: Sequence[Answer], findings: Sequence[Finding]) -> Iterator[Open]:
    """Give each difference, and each error, that no finding explains."""
    for answer in answers:
        cell = answer["cell"]
        where = (answer["place"], answer["on"], cell["trainer"], cell["relation"], cell["setting"])
        for difference, finding in explained(answer, findings):
            if finding is None:
                yield Open(*where, *(difference[name] for name in ("what", "left", "right")))


def explained(answer: Answer, findings: Sequence[Finding]) -> Iterator[tuple[Mapping[str, Any], Finding | None]]:
    """Give each difference of an answer with the finding that explains it, or None.

    A finding of a patch explains none where the patches are on.
    """
    cell, found = answer["cell"], list(differences_of(answer["cell"]))
    here = ledger.here(findings, _place(answer["place"]).version_of, on=answer["on"]) if found else []
    for difference in found:
        yield difference, ledger.cause_of(cell, difference["what"], here)


def not_seen(answers: Sequence[Answer], findings: Sequence[Finding]) -> Iterator[tuple[str, Finding]]:
    """Give each finding that explains nothing in a place of its range that was asked, with the place."""
    for name, on in dict.fromkeys((answer["place"], answer["on"]) for answer in answers):
        cells = [answer["cell"] for answer in answers if (answer["place"], answer["on"]) == (name, on)]
        for finding in ledger.here(findings, _place(name).version_of, on=on):
            asked = {cell["trainer"] for cell in cells if cell["relation"] == finding.relation}
            seen = any(finding.explains(cell, what) for cell in cells for what in said(cell))
            if asked >= set(finding.trainers) and not seen:
                yield f"{name} {'on' if on else 'off'}", finding


def differences_of(cell: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Give each difference in a cell. That its run failed is one without numbers."""
    yield from cell["differences"]
    if cell["state"] == ERROR:
        yield {"what": cell["why"], "left": None, "right": None}


def said(cell: Mapping[str, Any]) -> list[str]:
    """Return what differs in a cell, or why its run has failed."""
    return [difference["what"] for difference in differences_of(cell)]


def _place(name: str) -> Place:
    """Return a place by its name, such as ``1.16.0@tf4.57``."""
    return Place(*name.split("@"))
