"""The patches that would be on with another release of TRL than the installed one: what ``freeze --trl`` writes.

A process decides by the versions and by the body of each method. Here the user gives the versions, and the bodies
come from the files that the user gives, or from the record of the release. What TRL's class inherits has the body on
record for the version of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..matching import gates
from ..matching.fingerprints import bodies_for
from ..matching.inherited import body_in
from ..matching.sources import Release
from ..matching.versions import VersionOf, in_range
from ..model import Patch, Reason, State, Target
from ..patching.previews import preview
from ..reporting.report import Report
from ..selection.selection import Selection


def report_elsewhere(
    patches: Sequence[Patch], selection: Selection, version_of: VersionOf, files: Release | None
) -> Report:
    """Return the report that a process with these versions would give before it has imported TRL's trainers.

    A patch is pending only if the release has a body that is known to have the bug at each target. ``files`` are the
    release's; without them its bodies come from the record.
    """
    report = preview(patches, selection, version_of, files=files)
    statuses = []
    for status in report:
        unproven = _unproven(status.patch, version_of, files) if status.state is State.PENDING else None
        if unproven is not None:
            evidence = {"target": unproven.name}
            status = replace(status, state=State.SKIPPED, reason=Reason.UNKNOWN_BODY, evidence=evidence)
        statuses.append(status)
    return replace(report, patches=tuple(statuses))


def _unproven(patch: Patch, version_of: VersionOf, files: Release | None) -> Target | None:
    """Return a target whose body is not known to have the bug: only a process could tell, by its self-test."""
    trl, transformers = version_of("trl") or "", version_of("transformers")
    known = bodies_for(patch.id)
    for target in gates.targets_for(patch, trl) or patch.targets:
        body = known.at(target.name, trl, transformers) if files is None else body_in(files, target, transformers)
        if known.verdict(patch.id, target.name, body) != "buggy" or not _is_enough(patch, target, body, trl):
            return target
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
