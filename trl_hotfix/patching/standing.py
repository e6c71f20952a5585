"""Whether a patch still stands, in one answer: on its target, called by what is in its place, reached by the trainers.

The state of a patch as a whole follows from that of its module patches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..matching import gates
from ..model import Decision, Evidence, Options, Patch, Reason, State, Target
from ..reporting.report import PatchStatus, TargetStatus
from ..witness import Count
from .module_patch import ModulePatch

if TYPE_CHECKING:
    from .reach import Missed

_WORST_FIRST = (
    State.FAILED,
    State.CONFLICTED,
    State.DISPLACED,
    State.UNREACHED,
    State.SKIPPED,
    State.OBSERVED,
    State.APPLIED,
    State.PENDING,
    State.REVERTED,
)


def status_of(
    patch: Patch,
    trl: str | None,
    module_patches: Sequence[ModulePatch],
    decision: Decision,
    options: Options,
    count: Count | None = None,
    objects: Sequence[object] = (),
) -> PatchStatus:
    """Return the status of ``patch``: the worst decision of its module patches, or else ``decision`` of the gates.

    ``count`` has its calls, and ``objects`` are the instances of the patched classes.
    """
    fitting = gates.targets_for(patch, trl) if trl is not None else ()
    by_module = {module_patch.module: _current_decision(module_patch, objects) for module_patch in module_patches}
    if by_module:
        decision = min(by_module.values(), key=lambda current: _WORST_FIRST.index(current.state))
    by_evidence = {module: dict(current.evidence) for module, current in by_module.items() if current.evidence}
    evidence = by_evidence or decision.evidence

    def state_of(target: Target) -> State:
        if target.module in by_module:
            return by_module[target.module].state
        if decision.state is State.PENDING and target not in fitting:
            return State.SKIPPED
        return decision.state

    targets = tuple(TargetStatus(target, patch.range_of(target), state_of(target)) for target in patch.targets)
    count = count or Count()
    return PatchStatus(patch, decision.state, decision.reason, evidence, targets, options, count.called, count.acted)


def overtaken(module_patch: ModulePatch) -> bool:
    """Return whether a reload whose end was missed has replaced the patched class or function by a new one of TRL."""
    module = sys.modules.get(module_patch.module)
    if module_patch.decision.state not in (State.APPLIED, State.OBSERVED) or module is None:
        return False
    patched = [site.owner for site in module_patch.every_site()]
    owners = [getattr(module, target.attribute.split(".")[0], None) for target in module_patch.targets]
    for owner in owners:
        if isinstance(owner, type) and owner.__module__ == module_patch.module and owner not in patched:
            return True
    return any(site.reloaded() for site in module_patch.sites)


def _current_decision(module_patch: ModulePatch, objects: Sequence[object]) -> Decision:
    """Return the decision of a module patch, after a check that its wrappers are still on their targets."""
    if module_patch.decision.state is State.OBSERVED and module_patch.breaker.broken:
        evidence = {**module_patch.decision.evidence, "error": module_patch.breaker.error}
        return Decision(State.FAILED, Reason.WRAPPER_ERROR, evidence)
    if module_patch.decision.state is State.PENDING and objects:
        from .reach import copies

        return _unreached(copies(module_patch, objects), {}) or module_patch.decision
    if module_patch.decision.state is not State.APPLIED:
        return module_patch.decision
    from .compiled_code import still_compiled
    from .conflicts import still_on
    from .reach import missed
    from .sites import OccupiedError

    evidence = dict(module_patch.decision.evidence)
    if module_patch.breaker.broken:
        return Decision(State.FAILED, Reason.WRAPPER_ERROR, {**evidence, "error": module_patch.breaker.error})
    patched = [site.owner for site in module_patch.every_site()]
    for site in module_patch.sites:
        try:
            on_top = still_on(site, patched)
        except OccupiedError as error:
            return Decision(State.DISPLACED, error.reason, {**evidence, "by": error.by})
        if on_top is not None:
            evidence["beneath"] = on_top
    unreached = _unreached(missed(module_patch, objects), evidence)
    if unreached is not None:
        return unreached
    compiled = still_compiled(module_patch.compiled)
    if compiled:
        return Decision(State.UNREACHED, Reason.COMPILED, {**evidence, "by": compiled})
    return Decision(State.APPLIED, Reason.PROVEN, evidence)


def _unreached(found: Sequence[Missed], evidence: Evidence) -> Decision | None:
    """Return ``unreached``, with the first reason, if there is a trainer that the patch does not reach."""
    if not found:
        return None
    by = "; ".join(dict.fromkeys(one.by for one in found if one.reason is found[0].reason))
    return Decision(State.UNREACHED, found[0].reason, {**evidence, "by": by})
