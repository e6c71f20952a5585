"""May a patch go on? Pure decisions, each with its reason; neither trl nor torch is imported for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from packaging.version import Version

from ..model import Decision, Patch, Reason, State, Target
from ..selection.selection import Selection
from .versions import VersionOf, in_range, installed, is_unreleased


def decisions(patches: Iterable[Patch], selection: Selection, version_of: VersionOf = installed) -> dict[str, Decision]:
    """Where the gates leave each patch. What is installed is looked up once."""
    version_of = functools.cache(version_of)
    return {patch.id: decide(patch, selection, version_of) for patch in patches}


def decide(patch: Patch, selection: Selection, version_of: VersionOf = installed) -> Decision:
    """Where the gates leave ``patch``: disabled, retired, skipped, or pending with the reason ``applies``."""
    if patch.id in selection.skip:
        return Decision(State.DISABLED, Reason.EXCLUDED)
    if selection.only is not None and patch.id not in selection.only:
        return Decision(State.DISABLED, Reason.NOT_SELECTED)
    if selection.only is None and not patch.default:
        return Decision(State.DISABLED, Reason.DEFAULT_OFF)
    return applicability(patch, version_of)


def applicability(patch: Patch, version_of: VersionOf = installed) -> Decision:
    """Does ``patch`` belong to what is installed here, whatever the user selected?"""
    trl = version_of("trl")
    if trl is None:
        return Decision(State.SKIPPED, Reason.NO_TRL)
    seen: dict[str, object] = {"installed": trl, "range": patch.trl}
    inside = in_range(trl, patch.trl) and bool(targets_for(patch, trl))
    if not inside and not is_unreleased(trl):
        fixed_in = patch.upstream.fixed_in
        if fixed_in is not None and Version(trl) >= Version(fixed_in):
            return Decision(State.RETIRED, Reason.FIXED_UPSTREAM, {**seen, "fixed_in": fixed_in})
        return Decision(State.SKIPPED, Reason.TRL_VERSION, seen)
    unmet = lacking(patch, version_of)
    if unmet is not None:
        return Decision(State.SKIPPED, Reason.REQUIREMENT, {**seen, **unmet})
    return Decision(State.PENDING, Reason.APPLIES if inside else Reason.BODY_DECIDES, seen)


class Requirement(NamedTuple):
    """A distribution that a patch requires beside TRL, the versions that fit, and what is there."""

    distribution: str
    wanted: str
    found: str | None

    @property
    def met(self) -> bool:
        return self.found is not None and in_range(self.found, self.wanted)


def requirements(patch: Patch, version_of: VersionOf = installed) -> list[Requirement]:
    """What ``patch`` requires, each with what is there."""
    return [Requirement(name, wanted, version_of(name)) for name, wanted in patch.requires.items()]


def lacking(patch: Patch, version_of: VersionOf = installed) -> dict[str, object] | None:
    """The first that ``patch`` requires and that is not there, with what is there instead; None if it has all."""
    for each in requirements(patch, version_of):
        if not each.met:
            return {"requires": f"{each.distribution}{each.wanted}", "found": each.found}
    return None


def targets_for(patch: Patch, trl: str) -> tuple[Target, ...]:
    """The targets of ``patch`` that have the bug in this TRL release."""
    return tuple(target for target in patch.targets if in_range(trl, patch.range_of(target)))


def targets_here(patch: Patch, version_of: VersionOf = installed) -> tuple[Target, ...]:
    """The targets that have the bug beside what is installed here; none if ``patch`` does not belong to it."""
    belongs = applicability(patch, version_of).state is State.PENDING
    return targets_for(patch, version_of("trl") or "") if belongs else ()
