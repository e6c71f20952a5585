"""What ``apply()``, ``revert()`` and ``status()`` return: every patch, and where it stands in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from ..model import DEGRADED, Evidence, Options, Patch, Reason, State, Target
from .sentences import because

_STYLES = {State.APPLIED: "color: #2e8b57; font-weight: bold", State.PENDING: "color: #2e8b57"}
"""For HTML: the style of a patch that is on or goes on later. Others are red if they should be on, else gray."""


class TargetStatus(Struct, frozen=True):
    target: Target
    trl: str
    state: State


class PatchStatus(Struct, frozen=True):
    """A patch and where it stands in this process."""

    patch: Patch
    state: State
    reason: Reason
    evidence: Evidence
    targets: tuple[TargetStatus, ...]
    options: Options = {}

    @property
    def id(self) -> str:
        return self.patch.id

    @property
    def degraded(self) -> bool:
        """The patch should be on in this process and is not."""
        return (self.state, self.reason) in DEGRADED

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
            "targets": [
                {
                    "module": each.target.module,
                    "attribute": each.target.attribute,
                    "trl": each.trl,
                    "state": each.state.value,
                }
                for each in self.targets
            ],
        }


class Report(Struct, frozen=True):
    """What ``apply()``, ``revert()`` and ``status()`` return: every patch of the catalogue and where it stands."""

    trl_hotfix: str
    trl: str | None
    python: str
    patches: tuple[PatchStatus, ...]
    packs: Mapping[str, str] = {}
    """The packs of third parties that were named, with their distribution and version."""

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
        from html import escape  # only a notebook needs it

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
            # Those that should be on and are not come first.
            for status in sorted(self, key=lambda status: not status.degraded)
        ]
        names = row("patch", "state", "why", "repairs", "TRL range", tag="th")
        return f"<p>{escape(self._head())}</p><table><thead>{names}</thead><tbody>{''.join(rows)}</tbody></table>"

    def _head(self) -> str:
        return f"trl_hotfix {self.trl_hotfix}, TRL {self.trl or 'not found'}, digest {self.digest}"

    @property
    def degraded(self) -> tuple[PatchStatus, ...]:
        """The patches that should be on in this process and are not."""
        return tuple(status for status in self.patches if status.degraded)

    @property
    def ok(self) -> bool:
        return not self.degraded

    @property
    def digest(self) -> str:
        """Names the set of repairs of this process: equal in two processes if and only if these are the same.

        Made of the TRL version and the id, the revision and the options of every patch that is on or that goes on when
        its module is imported, so a rank that has not imported a trainer yet does not differ from one that has.
        """
        on = sorted(
            (each.id, each.patch.revision, *([dict(each.options)] if each.options else []))
            for each in self.patches
            if each.state in (State.APPLIED, State.PENDING)
        )
        text = json.dumps({"trl": self.trl, "on": on}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def freeze(self) -> dict[str, Any]:
        """The record of a run: what is on, or goes on when its module is imported, with revisions and options.

        As a file it is what ``TRL_HOTFIX_ONLY=@file`` takes.
        """
        on: list[dict[str, Any]] = [
            {"id": each.id, "revision": each.patch.revision, "options": dict(each.options)}
            for each in self.patches
            if each.state in (State.APPLIED, State.PENDING)
        ]
        record = {"trl_hotfix": self.trl_hotfix, "trl": self.trl, "digest": self.digest, "patches": on}
        theirs = {each["id"].partition("/")[0] for each in on}
        used = {name: release for name, release in self.packs.items() if name in theirs}
        return {**record, "packs": used} if used else record

    def to_dict(self) -> dict[str, Any]:
        return {
            "trl_hotfix": self.trl_hotfix,
            "trl": self.trl,
            "python": self.python,
            **({"packs": dict(self.packs)} if self.packs else {}),
            "digest": self.digest,
            "patches": [status.to_dict() for status in self.patches],
        }
