"""The report that ``apply()``, ``revert()`` and ``status()`` return: every patch and its state in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ..errors import printable
from ..matching.hits import Answer
from ..model import DEGRADED, Evidence, Options, Patch, Reason, State, Target
from ..selection.set_digest import digest_of
from .runs import Run
from .sentences import because

_STYLES = {
    State.APPLIED: "color: #2e8b57; font-weight: bold",
    State.OBSERVED: "color: #b8860b; font-weight: bold",
    State.PENDING: "color: #2e8b57",
}
"""The HTML style of a patch that is on, goes on later or is observed. Others are red if they should be on, or gray."""


_MANY = 5
"""So many patches that should be on and are not are named in a ``repr``."""


def _html_table(statuses: Iterable[PatchStatus]) -> str:
    from html import escape  # Only a notebook needs it.

    def row(*texts: str, tag: str = "td") -> str:
        start = f'<{tag} style="text-align: left">'
        return "<tr>" + "".join(f"{start}{text}</{tag}>" for text in texts) + "</tr>"

    def state(status: PatchStatus) -> str:
        by_need = "color: #c9302c; font-weight: bold" if status.degraded else "color: gray"
        words = escape(f"{status.state.value} ({status.reason.value})")
        return f'<span style="{_STYLES.get(status.state, by_need)}">{words}</span>'

    rows = [
        row(
            escape(status.id),
            state(status),
            *map(escape, (because(status.reason, status.evidence), status.patch.title, status.patch.trl)),
        )
        for status in statuses
    ]
    names = row("patch", "state", "why", "repairs", "TRL range", tag="th")
    return f"<table><thead>{names}</thead><tbody>{''.join(rows)}</tbody></table>"


class TargetStatus(Struct, frozen=True):
    target: Target
    trl: str
    state: State


class PatchStatus(Struct, frozen=True):
    """A patch and its state in this process."""

    patch: Patch
    state: State
    reason: Reason
    evidence: Evidence
    targets: tuple[TargetStatus, ...]
    options: Options = {}
    called: int = 0
    """The calls of its targets in this process by objects that still exist, and by functions."""
    acted: int = 0
    """The calls among them in which its wrappers acted."""

    def __repr__(self) -> str:
        return f"<{self.patch.id}: {self.state.value} ({self.reason.value})>"

    @property
    def id(self) -> str:
        return self.patch.id

    @property
    def degraded(self) -> bool:
        """The patch should be on in this process and is not."""
        return (self.state, self.reason) in DEGRADED

    def frozen(self) -> dict[str, Any]:
        """Return what a freeze file says of the patch."""
        return {"id": self.id, "revision": self.patch.revision, "options": dict(self.options)}

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.patch.id,
            "revision": self.patch.revision,
            "title": self.patch.title,
            "severity": self.patch.severity.value,
            "trl": self.patch.trl,
            "upstream": self.patch.upstream.to_dict(),
            "review_by": self.patch.review_by.isoformat() if self.patch.review_by is not None else None,
            "not_repaired": self.patch.not_repaired,
            "state": self.state.value,
            "reason": self.reason.value,
            "options": dict(self.options),
            "evidence": dict(self.evidence),
            "called": self.called,
            "acted": self.acted,
            "targets": [
                {
                    "module": status.target.module,
                    "attribute": status.target.attribute,
                    "trl": status.trl,
                    "called": status.target.called.value if status.target.called is not None else None,
                    "state": status.state.value,
                }
                for status in self.targets
            ],
        }


class Report(Struct, frozen=True):
    """Every patch of the catalogue and its state; ``apply()``, ``revert()`` and ``status()`` return it."""

    trl_hotfix: str
    trl: str | None
    python: str
    patches: tuple[PatchStatus, ...]
    packs: Mapping[str, str] = {}
    """The packs of third parties that were named, with their distribution and version."""
    observe: bool = False
    """Whether nothing is repaired in this process: patches are observed, and those that are pending will be."""
    runs: tuple[Run, ...] = ()
    """The trainers that have begun to train under a ``HotfixCallback``, with the bugs that their arguments hit."""

    def __iter__(self) -> Iterator[PatchStatus]:
        return iter(self.patches)

    def __getitem__(self, patch_id: str) -> PatchStatus:
        for status in self.patches:
            if status.id == patch_id:
                return status
        raise KeyError(patch_id)

    def __str__(self) -> str:
        lines = (f"  {status.id}: {status.state.value} ({status.reason.value})" for status in self.patches)
        return "\n".join([self._head(), *lines, *self._lines_of_runs()])

    def __repr__(self) -> str:
        counts = Counter(status.state.value for status in self.patches)
        words = ", ".join(f"{counts[state.value]} {state.value}" for state in State if counts[state.value])
        bad = ", ".join(status.id for status in self.degraded[:_MANY])
        more = f" and {len(self.degraded) - _MANY} more" if len(self.degraded) > _MANY else ""
        return printable(f"<{self._head()}: {words or 'no patch'}{f'; not on: {bad}{more}' if bad else ''}>")

    def _repr_html_(self) -> str:
        """Return the report for a notebook: what is on, or should be, as a table; the rest is folded."""
        from html import escape

        # The patches that should be on and are not come first, then those that are on.
        ranks = {state: rank for rank, state in enumerate(_STYLES)}
        shown = [status for status in self if status.degraded or status.state in ranks]
        shown.sort(key=lambda status: -1 if status.degraded else ranks[status.state])
        rest = [status for status in self if not (status.degraded or status.state in ranks)]
        folded = f"<details><summary>{len(rest)} more, with nothing to do here</summary>{_html_table(rest)}</details>"
        parts = [f"<p>{escape(self._head())}</p>", _html_table(shown) if shown else "<p>No patch is on.</p>"]
        runs = "".join(f"<li>{escape(line.strip())}</li>" for line in self._lines_of_runs())
        return "".join([*parts, f"<ul>{runs}</ul>" if runs else "", folded if rest else ""])

    def _lines_of_runs(self) -> Iterator[str]:
        """Yield a line for each bug that a run of this process hits."""
        for run in self.runs:
            for hit in run.hits:
                if hit.answer is Answer.HIT:
                    why = ", ".join(hit.because) or "as every run of this trainer"
                    yield printable(f"  {run.trainer} hits {hit.id}: {why}")

    def _head(self) -> str:
        observes = "; observing, repairing nothing" if self.observe else ""
        return f"trl_hotfix {self.trl_hotfix}, TRL {self.trl or 'not found'}, digest {self.digest}{observes}"

    @property
    def degraded(self) -> tuple[PatchStatus, ...]:
        """The patches that should be on in this process and are not."""
        return tuple(status for status in self.patches if status.degraded)

    @property
    def ok(self) -> bool:
        return not self.degraded

    def on(self) -> Iterator[PatchStatus]:
        """Yield the patches that are on or go on at import: none in a process that observes."""
        live = (State.APPLIED,) if self.observe else (State.APPLIED, State.PENDING)
        return (status for status in self.patches if status.state in live)

    @property
    def digest(self) -> str:
        """The digest of the set of repairs. It is equal in two processes if and only if the sets are equal.

        It is made of the TRL version and the id, the revision and the options of every patch that is on or goes on when
        its module is imported, so a rank that has not imported a trainer yet does not differ from one that has.
        """
        return digest_of(self.trl, (status.frozen() for status in self.on()))

    def freeze(self) -> dict[str, Any]:
        """Return the record of a run: the patches that are on or go on at import, with revisions and options.

        As a file it can be given to ``TRL_HOTFIX_ONLY=@file``.
        """
        on = [status.frozen() for status in self.on()]
        record = {"trl_hotfix": self.trl_hotfix, "trl": self.trl, "digest": self.digest, "patches": on}
        pack_names = {entry["id"].partition("/")[0] for entry in on}
        used = {name: release for name, release in self.packs.items() if name in pack_names}
        return {**record, "packs": used} if used else record

    def to_dict(self) -> dict[str, Any]:
        return {
            "trl_hotfix": self.trl_hotfix,
            "trl": self.trl,
            "python": self.python,
            **({"packs": dict(self.packs)} if self.packs else {}),
            **({"observe": True} if self.observe else {}),
            "digest": self.digest,
            "patches": [status.to_dict() for status in self.patches],
            **({"runs": [run.to_dict() for run in self.runs]} if self.runs else {}),
        }
