"""Why a patch goes on here, or does not: each gate in turn, with what it wants and what it found.

Nothing is imported for it: the bodies are read from the files of the TRL that is installed. What a process has done is
in ``status()``; whether the bug is there, the self-test says, which ``verify`` runs.
"""

from __future__ import annotations

from msgspec import Struct

from ..matching import gates, versions
from ..matching.fingerprints import bodies_for
from ..matching.sources import Release
from ..matching.versions import VersionOf
from ..model import Patch, Reason, State, Target
from ..selection.selection import Selection


class Step(Struct, frozen=True):
    """One gate: what it looks at, what it found, and whether the patch may go on. None: it cannot be told here."""

    gate: str
    found: str
    passed: bool | None


def trail(
    patch: Patch, selection: Selection, release: Release | None, version_of: VersionOf = versions.installed
) -> list[Step]:
    """The gates of ``patch``, as far as the first that it does not pass. ``release``: the TRL that is installed."""
    steps = [_selected(patch, selection)]
    trl = version_of("trl")
    if trl is None:
        return [*steps, Step("TRL", "not installed", False)]
    inside = versions.in_range(trl, patch.trl) or versions.is_unreleased(trl)
    steps.append(Step("TRL", f"{trl}, the range is {patch.trl}", inside))
    for each in gates.requirements(patch, version_of):
        steps.append(Step(each.distribution, f"{each.found or 'not installed'}, required is {each.wanted}", each.met))
    if all(step.passed for step in steps[1:]):
        targets = gates.targets_for(patch, trl) or patch.targets
        steps += [_body(patch, target, release) for target in targets]
    return steps


def _selected(patch: Patch, selection: Selection) -> Step:
    decision = gates.decide(patch, selection, lambda distribution: None)
    words = {
        Reason.EXCLUDED: "left out by skip= or TRL_HOTFIX_SKIP",
        Reason.NOT_SELECTED: "not among those that only= or TRL_HOTFIX_ONLY asks for",
        Reason.DEFAULT_OFF: f"off unless it is asked for: TRL_HOTFIX_ONLY={patch.id}",
    }
    off = decision.state is State.DISABLED
    on = "asked for" if selection.only is not None else "on by default"
    return Step("selection", words[decision.reason] if off else on, not off)


def _body(patch: Patch, target: Target, release: Release | None) -> Step:
    gate = f"body of {target.module}: {target.attribute}"
    if release is None:
        return Step(gate, "the files of this TRL are not beside its metadata: looked at when it is imported", None)
    body, known = release.body(target.module, target.attribute), bodies_for(patch.id)
    if body is None:
        return Step(gate, "this TRL has no such method", False)
    what = known.what(patch.id, target.name, body)
    same = known.releases_with(target.name, body)
    those = f", as in TRL {same[0]}" + (f" ... {same[-1]}" if len(same) > 1 else "") if same else ""
    if what == "buggy":
        return Step(gate, f"{body}: the bug was reproduced with this body{those}", True)
    if what is not None:
        return Step(gate, f"{body}: without the bug{those}", False)
    return Step(gate, f"{body}: on record for no release; TRL_HOTFIX_UNKNOWN_BODY=try lets the self-test decide", False)
