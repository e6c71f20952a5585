"""Put a patch on its targets in one module: red, install, green. If a step fails, nothing is changed.

A patch that is observed stops after red: layers that only count stand on its targets, and nothing is repaired.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, suppress
from types import ModuleType

from ..catalogue import modules
from ..matching import digests, fingerprints
from ..matching.versions import in_range, installed
from ..model import Decision, Evidence, Outcome, Patch, Reason, State, Target, Verdict
from ..witness import witnessed
from .inheritance import is_defined_by_trl
from .module_patch import ModulePatch
from .self_test import self_test
from .sites import MissingTargetError, OccupiedError, Site, Sites
from .wrappers import Layer


class _Refused(Exception):
    """The patch does not go on; ``decision`` has the reason. No wrapper of it is on."""

    def __init__(self, state: State, reason: Reason, evidence: Evidence) -> None:
        super().__init__(reason.value)
        self.decision = Decision(state, reason, evidence)


def try_apply(module_patch: ModulePatch, module: ModuleType, sites: Sites, *, try_unknown_body: bool) -> Decision:
    """Put ``module_patch`` on ``module``, which has been imported. Return ``applied``, ``observed`` or a reason.

    ``try_unknown_body`` lets the self-test decide about a body that is on record for no release.
    """
    _forget_replaced_classes(module_patch, module, sites)
    with ExitStack() as refused_or_failed:
        refused_or_failed.callback(_off_replaced_classes, module_patch)
        decision = _decide(module_patch, module, sites, try_unknown_body=try_unknown_body)
        if decision.state in (State.APPLIED, State.OBSERVED):
            refused_or_failed.pop_all()
    return decision


def _decide(module_patch: ModulePatch, module: ModuleType, sites: Sites, *, try_unknown_body: bool) -> Decision:
    try:
        located = _locate(module_patch, module, sites)
        if all(site.has(module_patch.patch.id) for site in located):
            return _on_already(module_patch, located)
        _check_bodies(module_patch, located, try_unknown_body=try_unknown_body)
        red = _reproduce(module_patch, module)
        if module_patch.observe:
            return _observe(module_patch, located, red)
        return _install_and_retest(module_patch, module, located, red)
    except _Refused as refused:
        return refused.decision


def _forget_replaced_classes(module_patch: ModulePatch, module: ModuleType, sites: Sites) -> None:
    """Hold the patched classes that a reload has replaced weakly: they live as long as others have them."""
    for site in list(module_patch.sites):
        if site.is_of_class_before_reload(module):
            module_patch.sites.remove(site)
            module_patch.before_reload.append(weakref.ref(site))
            sites.forget(site)


def _off_replaced_classes(module_patch: ModulePatch) -> None:
    """Take the patch off the classes before a reload whose new class it is refused on. The state speaks of both."""
    for site in module_patch.replaced_sites():
        with suppress(OccupiedError):
            site.take_off(module_patch.patch.id)
    module_patch.before_reload.clear()


def _locate(module_patch: ModulePatch, module: ModuleType, sites: Sites) -> list[Site]:
    """Return the site of each target. Refuse the patch if a target is missing."""
    located = []
    for target in module_patch.targets:
        try:
            located.append(sites.at(module, target))
        except MissingTargetError as error:
            evidence = {"missing": str(error)}
            if not in_range(installed("trl") or "", module_patch.patch.trl):
                raise _Refused(State.SKIPPED, Reason.TRL_VERSION, evidence) from None
            if _is_on_record(target):
                raise _Refused(State.CONFLICTED, Reason.DELETED, evidence) from None
            raise _Refused(State.SKIPPED, Reason.MISSING_TARGET, evidence) from None
    return located


def _on_already(module_patch: ModulePatch, located: list[Site]) -> Decision:
    """Return ``applied``, or ``observed``, for targets that have the patch already.

    They were reached under a second name: TRL keeps the old names of modules whose classes have moved.
    """
    if module_patch.decision.state in (State.APPLIED, State.OBSERVED):
        return module_patch.decision
    module_patch.sites = located
    evidence = {"same_as": "another name of the target"}
    if module_patch.observe:
        return Decision(State.OBSERVED, Reason.REPRODUCED, evidence)
    return Decision(State.APPLIED, Reason.PROVEN, evidence)


def _check_bodies(module_patch: ModulePatch, located: list[Site], *, try_unknown_body: bool) -> None:
    """Refuse the patch if other code has wrapped a target, or if we do not know that its body has the bug."""
    from .conflicts import foreign

    for site, target in zip(located, module_patch.targets, strict=True):
        owner_of_wrapper = foreign(site)
        if owner_of_wrapper is not None:
            evidence = {"target": f"{target.module}.{target.attribute}", "by": owner_of_wrapper}
            raise _Refused(State.CONFLICTED, Reason.FOREIGN_WRAPPER, evidence)
        _check_body(module_patch.patch, target, site, try_unknown_body=try_unknown_body)


def _check_body(patch: Patch, target: Target, site: Site, *, try_unknown_body: bool) -> None:
    if not callable(getattr(site.original, "__func__", site.original)):
        return  # The target has no body. Its wrapper cannot be installed, which reports the reason.
    body = digests.loaded(site.original)
    evidence = {"target": target.name, "body": body.digest}
    if not body.from_file:
        by = "code that is not what its file says"
        raise _Refused(State.CONFLICTED, Reason.REPLACED, {**evidence, "by": by})
    # What the class then inherits may be known to have the bug, and is not what this release runs.
    if not site.is_own and not is_defined_by_trl(site.original) and _is_on_record(target):
        by = "what TRL defines here was deleted"
        raise _Refused(State.CONFLICTED, Reason.DELETED, {**evidence, "by": by})
    verdict = fingerprints.bodies_for(patch.id).verdict(patch.id, target.name, body.digest)
    if verdict == "buggy":
        return
    trl = installed("trl") or ""
    if not in_range(trl, patch.range_of(target)):
        raise _Refused(State.SKIPPED, Reason.TRL_VERSION, {"installed": trl, "range": patch.trl, **evidence})
    if verdict is not None:
        raise _Refused(State.SKIPPED, Reason.ALREADY_FIXED, evidence)
    if not try_unknown_body:
        raise _Refused(State.SKIPPED, Reason.UNKNOWN_BODY, evidence)


def _is_on_record(target: Target) -> bool:
    """Return whether the installed release has this target. If it has, a missing target was deleted at run time."""
    return fingerprints.bodies().at(target.name, installed("trl") or "") is not None


def _reproduce(module_patch: ModulePatch, module: ModuleType) -> Outcome:
    """Return the outcome of the self-test on unpatched TRL. Refuse the patch if this does not reproduce the bug."""
    red = self_test(module_patch.patch, module, module_patch.options)
    if isinstance(red, Decision):
        raise _Refused(red.state, red.reason, red.evidence)
    if red.verdict is not Verdict.REPRODUCED:
        raise _Refused(State.SKIPPED, Reason.NOT_REPRODUCED, {"red": red.to_dict()})
    return red


def _observe(module_patch: ModulePatch, located: list[Site], red: Outcome) -> Decision:
    """Put a layer that only counts on each target: the bug is here, and stays."""
    layers = [(site, _layer(module_patch, target)) for site, target in zip(located, module_patch.targets, strict=True)]
    with ExitStack() as roll_back:
        for site, layer in layers:
            roll_back.callback(site.take_off, module_patch.patch.id)
            site.put_on(layer)
        module_patch.sites += [site for site, _ in layers if site not in module_patch.sites]
        roll_back.pop_all()
    return Decision(State.OBSERVED, Reason.REPRODUCED, {"red": red.to_dict()})


def _install_and_retest(module_patch: ModulePatch, module: ModuleType, located: list[Site], red: Outcome) -> Decision:
    """Put the wrappers on and test again. Take them off again unless the self-test returns ``fixed``."""
    from .compiled_code import compiled_now

    patch = module_patch.patch
    layers = []
    with ExitStack() as roll_back:
        for site, target in zip(located, module_patch.targets, strict=True):
            layer = _layer(module_patch, target)
            layers.append(layer)
            # The roll-back is registered first, so that a layer is taken off even if putting it on fails half-way.
            roll_back.callback(site.take_off, patch.id)
            site.put_on(layer)
        green = self_test(patch, module, module_patch.options)
        if isinstance(green, Decision):
            return green
        evidence = {"red": red.to_dict(), "green": green.to_dict()}
        if green.verdict is not Verdict.FIXED:
            return Decision(State.FAILED, Reason.SELF_TEST, evidence)
        # While the module is being imported the target cannot have been called, and so compiled, yet.
        if not getattr(module.__spec__, "_initializing", False):
            traced = any(target.traced for target in module_patch.targets)
            module_patch.compiled = compiled_now(traced=traced)
        for layer in layers:
            layer.armed = True
        # In the order of the targets. What other code has occupied in the meantime comes behind.
        module_patch.sites = [*located, *(site for site in module_patch.sites if site not in located)]
        roll_back.pop_all()
    return Decision(State.APPLIED, Reason.PROVEN, evidence)


def _layer(module_patch: ModulePatch, target: Target) -> Layer:
    patch, options, observe = module_patch.patch, tuple(sorted(module_patch.options.items())), module_patch.observe
    wrapper = modules.function_of(patch, target.wrapper, module_patch.options)
    counted = witnessed(patch.id, target.name, patch.revision, options, observe=observe)
    return Layer(
        patch.id, patch.revision, wrapper, target.traced, options, module_patch.breaker, counted, observe=observe
    )
