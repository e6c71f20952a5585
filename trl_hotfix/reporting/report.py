"""The report that ``apply()``, ``revert()`` and ``status()`` return: every patch and its state in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from ..model import DEGRADED, Evidence, Options, Patch, Reason, State, Target
from .sentences import because

_STYLES = {
    State.APPLIED: "color: #2e8b57; font-weight: bold",
    State.PENDING: "color: #2e8b57",
    State.OBSERVED: "color: #b8860b; font-weight: bold",
}
"""The HTML style of a patch that is on, goes on later or is observed. Others are red if they should be on, or gray."""


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

    def __iter__(self) -> Iterator[PatchStatus]:
        return iter(self.patches)

    def __getitem__(self, patch_id: str) -> PatchStatus:
        for status in self.patches:
            if status.id == patch_id:
                return status
        raise KeyError(patch_id)

    def __str__(self) -> str:
        lines = (f"  {status.id}: {status.state.value} ({status.reason.value})" for status in self.patches)
        return "\n".join([self._head(), *lines])

    def _repr_html_(self) -> str:
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
            # The patches that should be on and are not come first.
            for status in sorted(self, key=lambda status: not status.degraded)
        ]
        names = row("patch", "state", "why", "repairs", "TRL range", tag="th")
        return f"<p>{escape(self._head())}</p><table><thead>{names}</thead><tbody>{''.join(rows)}</tbody></table>"

    def _head(self) -> str:
        observes = "; observed, nothing is repaired" if self.observe else ""
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
        on = sorted(
            (status.id, status.patch.revision, *([dict(status.options)] if status.options else []))
            for status in self.on()
        )
        text = json.dumps({"trl": self.trl, "on": on}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

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
        }
