"""Decide whether a patch may go on, with a reason. The decisions are pure, and import neither trl nor torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from packaging.version import Version

from ..model import Bug, Decision, KnownBug, Patch, Reason, State, Target
from ..selection.selection import Selection
from .versions import VersionOf, in_range, installed, is_unreleased


def decisions(patches: Iterable[Patch], selection: Selection, version_of: VersionOf = installed) -> dict[str, Decision]:
    """Return the decision of the gates on each patch. Each version of a distribution is looked up once."""
    version_of = functools.cache(version_of)
    return {patch.id: decide(patch, selection, version_of) for patch in patches}


def decide(patch: Patch, selection: Selection, version_of: VersionOf = installed) -> Decision:
    """Return the decision of the gates on ``patch``: disabled, retired, skipped, or pending because it applies."""
    if patch.id in selection.skip:
        return Decision(State.DISABLED, Reason.EXCLUDED)
    if selection.only is not None and patch.id not in selection.only:
        return Decision(State.DISABLED, Reason.NOT_SELECTED)
    # A choice of one of its options names a patch too.
    if selection.only is None and not patch.default and patch.id not in selection.options:
        return Decision(State.DISABLED, Reason.DEFAULT_OFF)
    return applicability(patch, version_of)


def applicability(patch: Patch, version_of: VersionOf = installed) -> Decision:
    """Return whether ``patch`` applies to the installed versions, whatever the user selected: pending if it does."""
    trl = version_of("trl")
    if trl is None:
        return Decision(State.SKIPPED, Reason.NO_TRL)
    evidence: dict[str, object] = {"installed": trl, "range": patch.trl}
    inside = in_range(trl, patch.trl) and bool(targets_for(patch, trl))
    if not inside and not is_unreleased(trl):
        fixed_in = patch.upstream.fixed_in
        if fixed_in is not None and Version(trl) >= Version(fixed_in):
            return Decision(State.RETIRED, Reason.FIXED_UPSTREAM, {**evidence, "fixed_in": fixed_in})
        return Decision(State.SKIPPED, Reason.TRL_VERSION, evidence)
    unmet = lacking(patch, version_of)
    if unmet is not None:
        return Decision(State.SKIPPED, Reason.REQUIREMENT, {**evidence, **unmet})
    return Decision(State.PENDING, Reason.APPLIES if inside else Reason.BODY_DECIDES, evidence)


class Requirement(NamedTuple):
    """A distribution that a patch requires besides TRL, with the range of versions and the installed version."""

    distribution: str
    specifiers: str
    installed: str | None

    @property
    def met(self) -> bool:
        return self.installed is not None and in_range(self.installed, self.specifiers)


def requirements(patch: Bug, version_of: VersionOf = installed) -> list[Requirement]:
    """Return the requirements of ``patch``, or of a bug without a repair."""
    return [Requirement(name, specifiers, version_of(name)) for name, specifiers in patch.requires.items()]


def lacking(patch: Patch, version_of: VersionOf = installed) -> dict[str, object] | None:
    """Return the first unmet requirement of ``patch`` as evidence, or None if all are met."""
    for requirement in requirements(patch, version_of):
        if not requirement.met:
            return {
                "requires": f"{requirement.distribution}{requirement.specifiers}",
                "found": requirement.installed,
            }
    return None


def has_bug(trl: str, bug: Bug) -> bool:
    """Return whether this TRL release has the bug, whatever else it requires."""
    return in_range(trl, bug.trl) if isinstance(bug, KnownBug) else bool(targets_for(bug, trl))


def targets_for(patch: Patch, trl: str) -> tuple[Target, ...]:
    """Return the targets of ``patch`` that have the bug in this TRL release."""
    return tuple(target for target in patch.targets if in_range(trl, patch.range_of(target)))


def targets_here(patch: Patch, version_of: VersionOf = installed) -> tuple[Target, ...]:
    """Return the targets that have the bug in the installed TRL. If ``patch`` does not apply, that is no target."""
    applies = applicability(patch, version_of).state is State.PENDING
    return targets_for(patch, version_of("trl") or "") if applies else ()
