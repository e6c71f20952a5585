"""Foresee whether a process would refuse a patch for the body of a method. It reads TRL's files and imports nothing.

``patching/application`` decides in the process, by the method that TRL's module has then.
"""

from __future__ import annotations

from ..model import Decision, Patch, Reason, State, Target
from . import gates
from .fingerprints import bodies_for
from .inherited import body_in, may_be_inherited
from .sources import Release
from .versions import VersionOf, in_range


def refused(patch: Patch, version_of: VersionOf, files: Release | None, *, try_unknown_body: bool) -> Decision | None:
    """Return why a process would refuse a patch that has passed the gates, or None if it would try the patch.

    None too if only the process can tell. Without ``files`` the bodies are those on record for the release.
    """
    trl = version_of("trl") or ""
    for target in gates.targets_for(patch, trl) or patch.targets:
        reason, body = _at(patch, target, version_of, files)
        if reason is None or (reason is Reason.UNKNOWN_BODY and try_unknown_body):
            continue
        evidence: dict[str, object] = {"target": target.name, "body": body}
        if reason is not Reason.ALREADY_FIXED and not in_range(trl, patch.range_of(target)):
            return Decision(State.SKIPPED, Reason.TRL_VERSION, {"installed": trl, "range": patch.trl, **evidence})
        return Decision(State.SKIPPED, reason, evidence)
    return None


def _at(patch: Patch, target: Target, version_of: VersionOf, files: Release | None) -> tuple[Reason | None, str | None]:
    """Return the reason to refuse a patch at this target, or None, and the body there, or None if it is not known."""
    known, trl, transformers = bodies_for(patch.id), version_of("trl") or "", version_of("transformers")
    body = known.at(target.name, trl, transformers) if files is None else body_in(files, target, transformers)
    if body is not None:
        verdict = known.verdict(patch.id, target.name, body)
        if verdict == "buggy":
            return None, body
        return (Reason.UNKNOWN_BODY if verdict is None else Reason.ALREADY_FIXED), body
    if files is not None and not may_be_inherited(files, target.module, target.attribute):
        return Reason.MISSING_TARGET, None
    return (None if known.has_buggy(patch.id, target.name) else Reason.UNKNOWN_BODY), None
