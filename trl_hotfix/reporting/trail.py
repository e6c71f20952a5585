"""Trace why a patch goes on here or does not: each gate in turn, with its condition and its observation.

It reads the bodies from the files of the installed TRL and imports nothing. ``status()`` has the state of a process,
and ``verify`` runs the self-tests, which reproduce the bug.
"""

from __future__ import annotations

from msgspec import Struct

from ..matching import gates, versions
from ..matching.fingerprints import bodies_for
from ..matching.inherited import body_in
from ..matching.sources import Release
from ..matching.versions import VersionOf
from ..model import Patch, Reason, State, Target
from ..selection.selection import Selection


class Step(Struct, frozen=True):
    """One gate, its observation in words, and whether the patch passes it. None: we cannot tell here."""

    gate: str
    observation: str
    passed: bool | None


def trail(
    patch: Patch, selection: Selection, release: Release | None, version_of: VersionOf = versions.installed
) -> list[Step]:
    """Return the gates of ``patch``. It reads the bodies only if the patch passes all gates before them.

    ``release`` is the installed TRL.
    """
    steps = [_selected(patch, selection)]
    trl = version_of("trl")
    if trl is None:
        return [*steps, Step("TRL", "not installed", False)]
    inside = versions.in_range(trl, patch.trl) or versions.is_unreleased(trl)
    steps.append(Step("TRL", f"{trl}, the range is {patch.trl}", inside))
    for requirement in gates.requirements(patch, version_of):
        observation = f"{requirement.installed or 'not installed'}, required is {requirement.specifiers}"
        steps.append(Step(requirement.distribution, observation, requirement.met))
    if all(step.passed for step in steps[1:]):
        targets = gates.targets_for(patch, trl) or patch.targets
        steps += [_body(patch, target, release, version_of("transformers")) for target in targets]
    return steps


def _selected(patch: Patch, selection: Selection) -> Step:
    decision = gates.decide(patch, selection, lambda distribution: None)
    words = {
        Reason.EXCLUDED: "left out by skip= or TRL_HOTFIX_SKIP",
        Reason.NOT_SELECTED: "not among those that only= or TRL_HOTFIX_ONLY asks for",
        Reason.DEFAULT_OFF: f"off unless it is asked for: TRL_HOTFIX_ONLY={patch.id}",
    }
    off = decision.state is State.DISABLED
    on = "on by default" if selection.only is None and patch.default else "asked for"
    return Step("selection", words[decision.reason] if off else on, not off)


def _body(patch: Patch, target: Target, release: Release | None, transformers: str | None) -> Step:
    gate = f"body of {target.module}: {target.attribute}"
    if release is None:
        return Step(gate, "the files of this TRL are not beside its metadata: we read it at its import", None)
    body, known = body_in(release, target, transformers), bodies_for(patch.id)
    base = release.inherits(target.module, target.attribute)
    if body is None and base is not None:
        of = f"inherited, and not on record for transformers {transformers}"
        return Step(gate, f"{of}: we read it at its import", None)
    if body is None:
        return Step(gate, "this TRL has no such method", False)
    verdict = known.verdict(patch.id, target.name, body)
    releases = known.releases_with(target.name, body)
    as_in = f", as in TRL {releases[0]}" if releases else ""
    if len(releases) > 1:
        as_in += f" ... {releases[-1]}"
    if base is not None:
        as_in = f", inherited from transformers {transformers}"
    if verdict == "buggy":
        return Step(gate, f"{body}: the bug was reproduced with this body{as_in}", True)
    if verdict is not None:
        return Step(gate, f"{body}: without the bug{as_in}", False)
    if base is not None:
        return Step(gate, f"{body}{as_in}: the self-test has not run on it; {_TRY}", False)
    return Step(gate, f"{body}: on record for no release; {_TRY}", False)


_TRY = "TRL_HOTFIX_UNKNOWN_BODY=try lets the self-test decide"
