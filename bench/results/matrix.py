"""The evidence as a grid of patches and releases: what ``picture`` and ``summary`` draw."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.reporting import sentences

from bench.results import evidence

CHECKOUT = Path(__file__).parents[2]
MEANINGS = {
    "proven": "bug seen, repaired, and back after revert",
    "absent": "this release does not have the bug",
    "not-reproduced": "in range, but the bug is not seen",
    "unrepaired": "patched, and the bug is still there",
    "uncovered": "out of range, but the bug is there",
    "error": "no answer from the self-test",
    "unknown": "not looked at",
}
"""The verdicts of a cell, each with its meaning."""

FAILURES = ("not-reproduced", "unrepaired", "uncovered", "error")
WORST_FIRST = (*FAILURES, "unknown", "proven", "absent")
STALE = "stale: the patch or TRL's code is no longer the one that was tested; test it again"
SILENT = ("wrong-gradient", "wrong-loss", "data-loss", "wrong-metric")
"""The severities of bugs that no error shows."""

UNPRINTABLE = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@functools.cache
def matrix() -> dict[str, Any]:
    """Return the evidence on record for all patches: cells, proofs and parity, and by patch the curves of losses."""
    return evidence.everything()


@dataclass(frozen=True, slots=True)
class Row:
    """One patch of the catalogue, with its addresses upstream."""

    id: str
    title: str
    severity: str
    trl_range: str
    links: tuple[str, ...]
    default: bool = True
    """Whether the patch goes on without being named."""


def rows() -> tuple[Row, ...]:
    """Return a row for each patch of the catalogue."""
    return tuple(
        Row(
            patch.id,
            patch.title,
            patch.severity.value,
            patch.trl,
            tuple(sentences.links(patch.upstream)),
            patch.default,
        )
        for patch in loading.load()
    )


@dataclass(slots=True)
class Cell:
    """The evidence for one patch on one release: an entry for each stack, proof and comparison."""

    cells: list[Mapping[str, Any]] = field(default_factory=list)
    proofs: list[Mapping[str, Any]] = field(default_factory=list)
    parity: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """Return for each stack the verdict and whether it is stale."""
        return [(_verdict(entry), bool(entry.get("stale"))) for entry in self.cells] or [("unknown", False)]

    @property
    def worst(self) -> str:
        return min((verdict for verdict, _ in self.parts), key=WORST_FIRST.index)

    @property
    def marks(self) -> list[str]:
        proofs = {_verdict(entry) for entry in self.proofs}
        broken = not proofs <= {"proven", "absent"}
        return ["broken"] * broken + ["proof"] * ("proven" in proofs and not broken) + ["parity"] * bool(self.parity)

    @property
    def problems(self) -> list[str]:
        """Return what is wrong: ``failed``, ``unknown`` or ``stale``."""
        wrong = {
            "failed": self.worst in FAILURES or "broken" in self.marks,
            "unknown": self.worst == "unknown",
            "stale": any(stale for _, stale in self.parts),
        }
        return [name for name, present in wrong.items() if present]

    def lines(self) -> list[str]:
        """Return the cell in words and numbers."""
        # The message of an exception may have characters that UTF-8 cannot hold: one of them and no page is written.
        return [UNPRINTABLE.sub("\ufffd", line) for line in self._lines()]

    def _lines(self) -> Iterator[str]:
        if not self.cells:
            yield f"unknown: {MEANINGS['unknown']}"
        for entry in self.cells:
            verdict = entry["verdict"] if entry["verdict"] in MEANINGS else f"error: {entry['verdict']!r} is no verdict"
            yield f"{entry['stack']}: {verdict}" + (f", {STALE}" if entry.get("stale") else "")
            yield from _shared_run(entry)
            if entry.get("why"):
                yield f"why: {entry['why']}"
            for leaf, runs in entry.get("leaves", {}).items():
                yield from (f"{leaf}, {run}: {_words(outcome)}" for run, outcome in runs.items())
            yield from (f"body {target} = {digest}" for target, digest in entry.get("bodies", {}).items())
        for entry in self.proofs:
            yield f"real trainer, {entry['stack']}: {entry['verdict']}" + (
                f", {entry['why']}" if entry.get("why") else ""
            )
            yield from _shared_run(entry)
            yield from (f"real trainer, {run}: {_words(outcome)}" for run, outcome in entry.get("runs", {}).items())
        for entry in self.parity:
            yield (
                f"compared with TRL {entry['fixed_release']}: loss differs by {entry['loss_difference']:.3g}, "
                f"{entry['gradients']} gradients by {entry['gradient_difference']:.3g} at most"
            )


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells. Evidence for an unlisted patch or release has its row or column too: it may be a failure."""

    rows: tuple[Row, ...]
    releases: tuple[str, ...]
    cells: Mapping[tuple[str, str], Cell]
    version: str

    @classmethod
    def of(cls, evidence: Mapping[str, Any], catalogue: Sequence[Row]) -> Grid:
        cells: dict[tuple[str, str], Cell] = {}
        for kind in ("cells", "proofs", "parity"):
            for entry in sorted(evidence.get(kind, ()), key=lambda entry: str(entry.get("stack", ""))):
                getattr(cells.setdefault((entry["patch"], entry["release"]), Cell()), kind).append(entry)
        strays = sorted({patch for patch, _ in cells} - {row.id for row in catalogue})
        listed = tuple(evidence["releases"])
        return cls(
            (*catalogue, *(Row(patch, "Not in the catalogue", "not in the catalogue", "", ()) for patch in strays)),
            (*listed, *sorted({release for _, release in cells} - {*listed})),
            cells,
            evidence["trl_hotfix"],
        )

    def across(self, row: Row) -> list[Cell]:
        return [self.cells.get((row.id, release), Cell()) for release in self.releases]

    def counts(self) -> Counter[str]:
        """Return the number of cells with each worst verdict, each mark and each problem."""
        cells = [cell for row in self.rows for cell in self.across(row)]
        counts = Counter(name for cell in cells for name in (cell.worst, *cell.marks))
        # A cell that is unknown has this as its worst verdict too.
        return counts | Counter(name for cell in cells for name in cell.problems)

    def size(self) -> str:
        span = f", {self.releases[0]} to {self.releases[-1]}" if self.releases else ""
        patches = f"{len(self.rows)} patch{'es' * (len(self.rows) != 1)}"
        return f"{patches} on {len(self.releases)} releases of TRL{span}"

    def problems(self) -> str:
        """Return how many cells have which problem, or nothing if none has."""
        counts = self.counts()
        return ", ".join(f"{counts[name]} {name}" for name in ("failed", "unknown", "stale") if counts[name])


def _verdict(entry: Mapping[str, Any]) -> str:
    return entry["verdict"] if entry["verdict"] in MEANINGS else "error"


def _shared_run(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if the run was on another release. Releases in which it calls the same code share one run."""
    if entry.get("ran", entry["release"]) != entry["release"]:
        yield f"run on TRL {entry['ran']}: the code that is called is the same"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = {key: _words(item) for key, item in value.items() if key != "traceback"}
        return ", ".join(text if key == "verdict" else f"{key} {text}" for key, text in shown.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)
