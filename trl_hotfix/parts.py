"""A patch in one leaf module, and where a patch stands when its parts stand where they do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from . import gates
from .model import Decision, Options, Patch, PatchStatus, Reason, State, Target, TargetStatus

if TYPE_CHECKING:
    from .conflicts import Compiled
    from .guard import Guard
    from .install import Site


class ModulePatch(Struct, eq=False):
    """A patch in one leaf module."""

    patch: Patch
    leaf: str
    targets: tuple[Target, ...]
    options: Options = {}
    decision: Decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
    sites: list[Site] = []
    guards: list[Guard] = []
    cancel_requested: bool = False
    compiled: Compiled = ()
    journal: list[str] = []

    @property
    def key(self) -> tuple[str, str]:
        return self.patch.id, self.leaf


_WORST_FIRST = (
    State.FAILED,
    State.CONFLICTED,
    State.DISPLACED,
    State.UNREACHED,
    State.SKIPPED,
    State.APPLIED,
    State.PENDING,
    State.REVERTED,
)


def status_of(
    patch: Patch,
    trl: str | None,
    parts: list[ModulePatch],
    decision: Decision,
    options: Options,
    objects: Sequence[object] = (),
) -> PatchStatus:
    """A patch stands where the worst of its parts does. ``objects`` are those of the classes that patches are on."""
    here = gates.targets_for(patch, trl) if trl is not None else ()
    now = {part.leaf: _now(part, objects) for part in parts}
    if now:
        decision = min(now.values(), key=lambda each: _WORST_FIRST.index(each.state))
    evidence = {leaf: dict(each.evidence) for leaf, each in now.items() if each.evidence} or decision.evidence

    def state_of(target: Target) -> State:
        if target.module in now:
            return now[target.module].state
        if decision.state is State.PENDING and target not in here:
            return State.SKIPPED
        return decision.state

    targets = tuple(TargetStatus(each, patch.range_of(each), state_of(each)) for each in patch.targets)
    return PatchStatus(patch, decision.state, decision.reason, evidence, targets, options)


def overtaken(part: ModulePatch) -> bool:
    """Has a reload that nobody saw end put a new class or function of TRL's in the place of the one that is patched?"""
    module = sys.modules.get(part.leaf)
    if part.decision.state is not State.APPLIED or module is None:
        return False
    held = [site.owner for site in part.sites]
    classes = [getattr(module, target.attribute.split(".")[0], None) for target in part.targets]
    new = [each for each in classes if isinstance(each, type) and each.__module__ == part.leaf and each not in held]
    return bool(new) or any(site.reloaded() for site in part.sites)


def _now(part: ModulePatch, objects: Sequence[object]) -> Decision:
    """Where a part stands, after a look whether its wrappers are still on their targets."""
    if part.decision.state is not State.APPLIED:
        return part.decision
    from .conflicts import overridden, still_compiled, still_on
    from .install import OccupiedError

    evidence = dict(part.decision.evidence)
    for guard in part.guards:
        if guard.broken is not None:
            error = f"{type(guard.broken).__name__}: {guard.broken}"
            return Decision(State.FAILED, Reason.WRAPPER_ERROR, {**evidence, "error": error})
    held = [site.owner for site in part.sites]
    for site in part.sites:
        try:
            on_top = still_on(site, held)
        except OccupiedError as error:
            return Decision(State.DISPLACED, error.reason, {**evidence, "by": error.by})
        if on_top is not None:
            evidence["beneath"] = on_top
    by = [each for site in part.sites for each in overridden(site, objects)]
    if by:
        return Decision(State.UNREACHED, Reason.OVERRIDDEN, {**evidence, "by": "; ".join(by)})
    compiled = still_compiled(part.compiled)
    if compiled:
        return Decision(State.UNREACHED, Reason.COMPILED, {**evidence, "by": compiled})
    return Decision(State.APPLIED, Reason.PROVEN, evidence)
