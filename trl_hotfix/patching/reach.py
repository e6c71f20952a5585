"""Which trainers a patch does not reach, although it stands on TRL's class.

What a trainer has called decides. Two questions are asked of it. When training begins: did its construction go through
the patch? When a step has been taken: did it call every method that each step of its class calls? Whether a method of a
user's own calls TRL's is not read from its text.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .. import witness
from ..catalogue.modules import PATCH_MODULES
from ..model import Called, Patch, Reason, Target

if TYPE_CHECKING:
    from .module_patch import ModulePatch
    from .sites import Site

BEFORE_TRAINING = (Called.CONSTRUCTION, Called.SOME_CONSTRUCTIONS, Called.PREPARATION)
"""A target that is called so early cannot repair a trainer that exists already."""

STAND_INS = f"{__package__.partition('.')[0]}.testing."
"""Where the trainers of self-tests are made."""


class Missed(Struct, frozen=True):
    """A trainer that a patch does not reach, and why."""

    patch: Patch
    reason: Reason
    by: str


def missed(module_patch: ModulePatch, objects: Sequence[Any]) -> list[Missed]:
    """Return the trainers among ``objects`` that an applied patch does not reach."""
    return [
        Missed(module_patch.patch, reason, description)
        for trainer in objects
        if is_trainer(trainer)
        for reason, description in _reasons(module_patch, trainer)
    ]


def copies(module_patch: ModulePatch, objects: Sequence[Any]) -> list[Missed]:
    """Return the trainers among ``objects`` whose class is a copy of one that the patch is for.

    TRL's own module need not be imported.
    """
    return [
        Missed(module_patch.patch, Reason.NOT_INHERITED, f"{_name(trainer)} does not inherit {target.attribute}")
        for trainer in objects
        if is_trainer(trainer)
        for target in module_patch.targets
        if _looks_like(trainer, target.attribute.partition(".")[0])
    ]


def _reasons(module_patch: ModulePatch, trainer: Any) -> Iterator[tuple[Reason, str]]:
    patch, ledger = module_patch.patch, witness.known(trainer)
    made_with = witness.construction(trainer)
    for site, target in zip(module_patch.sites, module_patch.targets, strict=False):
        if not _may_call(site, patch, type(trainer)):
            if isinstance(site.owner, type) and _looks_like(trainer, site.owner.__name__):
                yield Reason.NOT_INHERITED, f"{_name(trainer)} does not inherit {target.attribute}"
            continue
        if target.called in BEFORE_TRAINING:
            called = ledger is not None and ledger.total(patch.id, target.name).called
            of_target = [key for key in made_with or () if key[:2] == (patch.id, target.name) and not key[-1]]
            called = called or any((made_with or {})[key][0] for key in of_target)
            if not called and (target.called is Called.CONSTRUCTION or not of_target):
                yield _not_made_with(site, target, trainer, stood=bool(of_target))
        elif ledger is not None and isinstance(site.owner, type) and _misses_steps(ledger, patch, target):
            yield _not_called(site, target, trainer)


def _may_call(site: Site, patch: Patch, trainer_class: type) -> bool:
    """Return whether trainers of this class call this target, whatever methods of their own do.

    TRL's own subclass may replace the method, and need not have the bug: it is asked if the patch names it.
    """
    if not _is_of_trainers(site.owner):
        return not isinstance(site.owner, type) and _concerns(patch, trainer_class)
    classes = trainer_class.__mro__
    if site.owner not in classes:
        return False
    concerned = {f"{name}Trainer" for hit in patch.hits for name in hit.trainers}
    return not any(
        site.name in vars(cls) and is_trls_own(cls) and cls.__name__ not in concerned
        for cls in classes[: classes.index(site.owner)]
    )


def _not_made_with(site: Site, target: Target, trainer: Any, *, stood: bool) -> tuple[Reason, str]:
    by = _overriding(site, trainer)
    if by is not None and (stood or not witness.construction(trainer)):
        return Reason.OVERRIDDEN, by
    if stood:
        return Reason.NOT_CALLED, f"{_name(trainer)} was made without a call of {target.attribute}"
    return Reason.MADE_BEFORE, f"a {_name(trainer)} was made before the patch went on"


def _not_called(site: Site, target: Target, trainer: Any) -> tuple[Reason, str]:
    by = _overriding(site, trainer)
    if by is not None:
        return Reason.OVERRIDDEN, by
    return Reason.NOT_CALLED, f"{_name(trainer)} took a step without a call of {target.attribute}"


def every_step_calls(module_patches: Iterable[ModulePatch], patch: Patch, trainer: Any) -> bool:
    """Return whether each step of this trainer should call a target of the patch."""
    return any(
        target.called is Called.STEP and not target.traced and _may_call(site, patch, type(trainer))
        for module_patch in module_patches
        if module_patch.patch.id == patch.id
        for site, target in zip(module_patch.sites, module_patch.targets, strict=False)
    )


def stands_in(module_patches: Iterable[ModulePatch], patch: Patch, trainer: Any) -> str:
    """Return the method that the trainer has, or a class of its own, in place of a target of steps, or no text."""
    found = [
        _overriding(site, trainer)
        for module_patch in module_patches
        if module_patch.patch.id == patch.id
        for site, target in zip(module_patch.sites, module_patch.targets, strict=False)
        if target.called in (Called.STEP, Called.SOME_STEPS) and _may_call(site, patch, type(trainer))
    ]
    return next((by for by in found if by is not None), "")


def _overriding(site: Site, trainer: Any) -> str | None:
    """Describe the method of the trainer itself, or of a class of its own, that is called instead of this one."""
    from .wrappers import describe

    if not isinstance(site.owner, type):
        return None
    own = vars(trainer).get(site.name)
    if own is not None:
        return f"{site.name} of an instance of {_name(trainer)}: {describe(own)}"
    classes = type(trainer).__mro__
    for cls in classes[: classes.index(site.owner)]:
        if site.name in vars(cls):
            return f"{cls.__module__}.{cls.__qualname__}.{site.name}"
    return None


def _misses_steps(ledger: witness.Ledger, patch: Patch, target: Target) -> bool:
    """Return whether this run has taken a step, and none has called a target of every step."""
    if target.called is not Called.STEP or target.traced:
        return False
    return _has_been_on_for_a_step(ledger, patch, target) and not _called_in_steps(ledger, patch, target)


def _has_been_on_for_a_step(ledger: witness.Ledger, patch: Patch, target: Target) -> bool:
    """Return whether a step of the run has begun and ended while the patch was on this target."""
    steps = ledger.run.steps
    return any(
        (first or 1) <= (steps if last is None else last)
        for each, spans in ledger.run.stood.items()
        if (each.patch, each.target, each.observe) == (patch.id, target.name, False)
        for first, last in spans
    )


def _called_in_steps(ledger: witness.Ledger, patch: Patch, target: Target) -> bool:
    return any(
        ledger.in_run(phase, each).called
        for phase in ledger.step_phases
        for each in list(ledger.by_phase[phase].counts)
        if (each.patch, each.target, each.observe) == (patch.id, target.name, False)
    )


def concerning(module_patches: Iterable[ModulePatch], trainer: Any) -> set[str]:
    """Return the ids of the patches that are on methods of ``trainer``, or on a function that it may call.

    Without a trainer (None), they are all patches that are on.
    """
    if trainer is None:
        return {module_patch.patch.id for module_patch in module_patches if module_patch.sites}
    return concerning_class(module_patches, type(trainer))


def concerning_class(module_patches: Iterable[ModulePatch], trainer_class: type) -> set[str]:
    """Return the ids of the patches that are on methods of trainers of this class, or on what they may call."""
    return {
        module_patch.patch.id
        for module_patch in module_patches
        for site in module_patch.every_site()
        if _may_call(site, module_patch.patch, trainer_class)
        or (not _is_of_trainers(site.owner) and _concerns(module_patch.patch, trainer_class))
    }


def _is_of_trainers(owner: Any) -> bool:
    base = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return base is not None and isinstance(owner, type) and issubclass(owner, base)


def all_trainers() -> list[Any]:
    """Return all trainers of this process, those of self-tests left out."""
    return [instance for instance in instances_of(trainer_classes()) if is_trainer(instance)]


def instances_of(classes: Collection[type]) -> list[Any]:
    """Return the instances of exactly these classes. The search through the garbage collector takes some 60 ms."""
    # type() is used, since the `__class__` of a proxy may be that of another object.
    return [
        referrer
        for referrer in (gc.get_referrers(*classes) if classes else [])
        if type(referrer) in classes and hasattr(referrer, "__dict__")
    ]


def trainer_classes() -> set[type]:
    """Return the trainer of transformers and all its subclasses."""
    base = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    return {base, *subclasses(base)} if base is not None else set()


def is_trainer(instance: Any) -> bool:
    """Return whether this is a trainer whose constructor has run."""
    base = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    cls = type(instance)
    return base is not None and issubclass(cls, base) and "callback_handler" in vars(instance) and not is_stand_in(cls)


def is_stand_in(cls: type) -> bool:
    """Return whether ``cls`` is a self-test's stand-in for a trainer. It exists until it is garbage-collected."""
    return f"{cls.__module__}.".startswith(STAND_INS) or cls.__module__ in PATCH_MODULES


def subclasses(owner: type) -> list[type]:
    direct: list[type] = type.__subclasses__(owner)
    return direct + [subclass for child in direct for subclass in subclasses(child)]


def is_trls_own(cls: type) -> bool:
    """Return whether a class is one of TRL's trainers, and not the private base of them all."""
    own = f"{cls.__module__}.".startswith("trl.") and cls.__name__.endswith("Trainer")
    return own and cls.__name__ not in ("BaseTrainer", "_BaseTrainer")


def looks_like_trls(trainer: Any, names: Collection[str]) -> bool:
    """Return whether the trainer's class is a copy, outside TRL, of one of TRL's trainers of these names."""
    return any(_looks_like(trainer, name) for name in names)


def _looks_like(trainer: Any, name: str) -> bool:
    """Return whether a class outside TRL has the name of TRL's trainer, or is used with its config."""
    classes = type(trainer).__mro__
    if not name.endswith("Trainer"):
        return False
    of_trl = {cls.__name__ for cls in classes if is_trls_own(cls)}
    others = {cls.__name__ for cls in classes if not f"{cls.__module__}.".startswith(("transformers.", "trl."))}
    configs = {cls.__name__ for cls in type(getattr(trainer, "args", None)).__mro__}
    has_name, has_config = name in others, f"{name.removesuffix('Trainer')}Config" in configs
    if of_trl:
        # A subclass of another of TRL's trainers may share a config with this one, or a name.
        return has_name and has_config and name not in of_trl
    return has_name or has_config


def _concerns(patch: Patch, trainer_class: type) -> bool:
    """Return whether the patch names this class, or a base of it, among the trainers that have its bug."""
    names = {cls.__name__.removesuffix("Trainer") for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")}
    return any(names & {*hit.trainers} or (names and "*" in hit.trainers) for hit in patch.hits)


def _name(trainer: Any) -> str:
    return f"{type(trainer).__module__}.{type(trainer).__qualname__}"
