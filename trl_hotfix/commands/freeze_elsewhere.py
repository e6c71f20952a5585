"""The patches that would be on with another release of TRL than the installed one: what ``freeze --trl`` writes.

A process decides by the versions and by the body of each method. Here the versions are told, and the bodies are those
of the files that are given, or else those on record for the release. What TRL's class inherits has the body that is on
record for the version of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ..matching import gates
from ..matching.fingerprints import bodies_for
from ..matching.inherited import body_in, is_inherited
from ..matching.sources import Release
from ..matching.versions import VersionOf, in_range
from ..model import Decision, Patch, Reason, State, Target
from ..patching.previews import preview
from ..reporting.report import Report
from ..selection.selection import Selection


def report_elsewhere(
    patches: Sequence[Patch], selection: Selection, version_of: VersionOf, files: Release | None
) -> Report:
    """Return the report that a process with these versions would give before it has imported TRL's trainers.

    A patch is pending only if the release has a body that is known to have the bug at each target. ``files`` are those
    of the release; without them its bodies are those on record.
    """
    report = preview(patches, selection, version_of)
    statuses = []
    for status in report:
        refused = _refused(status.patch, version_of, files) if status.state is State.PENDING else None
        if refused is not None:
            status = replace(status, state=refused.state, reason=refused.reason, evidence=refused.evidence)
        statuses.append(status)
    return replace(report, patches=tuple(statuses))


def _refused(patch: Patch, version_of: VersionOf, files: Release | None) -> Decision | None:
    """Return the decision of a process that finds the body of a target to be without the bug, or unknown."""
    trl, transformers = version_of("trl") or "", version_of("transformers")
    for target in gates.targets_for(patch, trl) or patch.targets:
        known = bodies_for(patch.id)
        body = known.at(target.name, trl, transformers) if files is None else body_in(files, target, transformers)
        verdict = known.verdict(patch.id, target.name, body)
        if verdict == "buggy" and _is_enough(patch, target, body, trl):
            continue
        evidence: Mapping[str, object] = {"target": target.name, "body": body}
        if verdict not in (None, "buggy"):
            return Decision(State.SKIPPED, Reason.ALREADY_FIXED, evidence)
        if body is None and files is not None and not is_inherited(files, target.module, target.attribute):
            return Decision(State.SKIPPED, Reason.MISSING_TARGET, evidence)
        return Decision(State.SKIPPED, Reason.UNKNOWN_BODY, evidence)
    return None


def _is_enough(patch: Patch, target: Target, body: str | None, trl: str) -> bool:
    """Return whether a body with the bug decides. Out of its range it may do no harm, and a self-test would tell."""
    ranged = patch.range_of(target)
    same = bodies_for(patch.id).releases_with(target.name, body)
    return in_range(trl, ranged) or all(in_range(release, ranged) for release in same)


def needed(report: Report, trl: str) -> set[str]:
    """Return the distributions whose versions decide whether a patch of this release is on."""
    return {
        name
        for status in report
        if status.state is not State.DISABLED and gates.has_bug(trl, status.patch)
        for name in status.patch.requires
    }


def left_out(report: Report, trl: str) -> list[str]:
    """Return a line for each patch whose release this is and that would not be on, with the reason."""
    words = {
        Reason.ALREADY_FIXED: "{target} is without the bug",
        Reason.MISSING_TARGET: "there is no {target}",
        Reason.UNKNOWN_BODY: "it is not proven on the code of {target}",
        Reason.REQUIREMENT: "it needs {requires}, and found is {found}",
    }
    return [
        f"left out: {status.id}: {words[status.reason].format_map(status.evidence)}"
        for status in report
        if status.state is State.SKIPPED and status.reason in words and gates.has_bug(trl, status.patch)
    ]
