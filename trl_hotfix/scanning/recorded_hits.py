"""What a run's record says of the bugs that it hits: its trainer was asked when training began.

The record is data of a file, which may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from .. import __version__
from ..errors import ScriptError, plain, reason
from ..model import Severity

_JUDGED = ("repaired", "on some ranks", "called", "in evaluation only", "not seen", "standing by")
"""The words of patches whose bugs the record judged for the trainer of the run, and not for other ones."""


class RecordedHit(Struct, frozen=True):
    """What the run found out about a bug, as it stands in its record. ``answer`` "not hit" has no reasons."""

    id: str
    answer: Literal["hit", "cannot tell", "not hit"]
    severity: Severity | None = None
    symptom: str = ""
    because: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def recorded_hits(record: Mapping[str, Any], file: str) -> dict[str, RecordedHit]:
    """Return what the record says, by the ids of the bugs. Raises ``ScriptError`` if it says it in no known way.

    A bug that is not among the hits was no hit, if the record judged its patch for this trainer. We conclude that only
    from the record of this version of trl_hotfix: another one may not have known all the ways into the bug.
    """
    try:
        entries = [entry for name in ("hits", "observed") for entry in record.get(name) or ()]
        hits = {hit.id: _readable(hit) for hit in msgspec.convert(entries, list[RecordedHit])}
    except (msgspec.ValidationError, TypeError) as error:
        raise ScriptError(
            f"{file} is no record of a run: in its hits: {reason(error)}; expected the trl_hotfix.json of a run"
        ) from None
    if "hits" not in record or record.get("trl_hotfix") != __version__:
        return hits
    patches = record.get("patches")
    for entry in patches if isinstance(patches, list) else ():
        if isinstance(entry, dict) and entry.get("word") in _JUDGED:
            patch_id = str(entry.get("id"))
            hits.setdefault(patch_id, RecordedHit(patch_id, "not hit"))
    return hits


def _readable(hit: RecordedHit) -> RecordedHit:
    """Return the same without control characters, for a terminal."""
    because, unknown = (tuple(map(plain, reasons)) for reasons in (hit.because, hit.unknown))
    return RecordedHit(plain(hit.id), hit.answer, hit.severity, plain(hit.symptom), because, unknown)
