"""Which trainers a patch does not reach, although it stands on TRL's class.

A trainer may have been made before the patch, be of a class that only looks like TRL's, or not call the method that the
patch is on. The first two are known at once, the last after a step.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ..by_identity import ByIdentity
from ..catalogue.modules import PATCH_MODULES
from ..model import Called, Patch, Reason
from ..witness import counts_of

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


class _Training(Struct):
    """The calls of the targets by a trainer before its training began, and whether it has taken a step since."""

    called_before: dict[tuple[str, str], int]
    stepped: bool = False


_trainings: ByIdentity[_Training] = ByIdentity()


def training_begins(trainer: Any, module_patches: Iterable[ModulePatch]) -> None:
    """Note that ``trainer`` begins to train, with the calls that it has made so far."""
    targets = [(mod.patch.id, target.name) for mod in module_patches for target in mod.targets]
    _trainings[trainer] = _Training({key: _called(*key, trainer) for key in targets})


def step_taken(trainer: Any) -> None:
    """Note that ``trainer`` has taken an optimizer step since its training began."""
    training = _trainings.get(trainer)
    if training is not None:
        training.stepped = True


def missed(module_patch: ModulePatch, objects: Sequence[Any]) -> list[Missed]:
    """Return the trainers among ``objects`` that an applied patch does not reach."""
    trainers = [instance for instance in objects if is_trainer(instance)]
    return [
        Missed(module_patch.patch, reason, description)
        for trainer in trainers
        for reason, description in _reasons(module_patch, trainer)
    ]


_went_on: ContextVar[list[tuple[ModulePatch, set[Any]]] | None] = ContextVar("went_on", default=None)
"""What went on in the present ``one_search``, with the owners of the sites."""


@contextmanager
def one_search() -> Iterator[None]:
    """Let all patches that go on in the block share one search for trainers, at its end.

    A trainer that another thread makes within the block is taken for one that was made before.
    """
    went_on: list[tuple[ModulePatch, set[Any]]] = []
    token = _went_on.set(went_on)
    try:
        yield
    finally:
        _went_on.reset(token)
        _note_trainers_made_before(went_on)


def note_trainers_made_before(module_patch: ModulePatch, sites: Iterable[Site]) -> None:
    """Note the trainers that exist when the patch goes on, and that have been made, or prepared their data, before.

    It looks only where the targets are called that early: the search visits all objects, which takes some 60 ms.
    """
    module_patch.made_before = []
    if any(target.called in BEFORE_TRAINING for target in module_patch.targets):
        new = module_patch, {site.owner for site in sites}
        together = _went_on.get()
        if together is None:
            _note_trainers_made_before([new])
        else:
            together.append(new)


def _note_trainers_made_before(went_on: Collection[tuple[ModulePatch, set[Any]]]) -> None:
    references = [weakref.ref(trainer) for trainer in (all_trainers() if went_on else ())]
    if references:
        # One that nobody holds any more may wait for the collector, and strict mode would raise for it.
        gc.collect()
    for module_patch, owners in went_on:
        module_patch.made_before = [
            reference
            for reference in references
            if (trainer := reference()) is not None and _is_concerned(trainer, module_patch.patch, owners)
        ]


def _is_concerned(trainer: Any, patch: Patch, owners: Collection[Any]) -> bool:
    return not {*type(trainer).__mro__}.isdisjoint(owners) or _concerns(patch, trainer)


def concerning(module_patches: Iterable[ModulePatch], trainer: Any) -> set[str]:
    """Return the ids of the patches that are on methods of ``trainer``, or on a function that it may call.

    Where the trainer is not known (None), they are all patches that are on.
    """
    if trainer is None:
        return {module_patch.patch.id for module_patch in module_patches if module_patch.sites}
    return {
        module_patch.patch.id
        for module_patch in module_patches
        for site in module_patch.every_site()
        if _comes_first(site, trainer) or (not _is_of_trainers(site.owner) and _concerns(module_patch.patch, trainer))
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


def _reasons(module_patch: ModulePatch, trainer: Any) -> Iterable[tuple[Reason, str]]:
    name = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    patch, training = module_patch.patch, _trainings.get(trainer)
    made_before = any(reference() is trainer for reference in module_patch.made_before)
    for site, target in zip(module_patch.sites, module_patch.targets, strict=False):
        called = _called(patch.id, target.name, trainer)
        if isinstance(site.owner, type) and site.owner not in type(trainer).__mro__:
            if _looks_like(trainer, site.owner):
                yield Reason.NOT_INHERITED, f"{name} does not inherit {target.attribute}"
        elif made_before and target.called in BEFORE_TRAINING and not called:
            yield Reason.MADE_BEFORE, f"a {name} was made before the patch went on"
        elif target.called is Called.STEP and training is not None and training.stepped:
            # A target of a patch that went on during the training is not among those of its beginning.
            before = training.called_before.get((patch.id, target.name))
            if before is not None and called == before and not target.traced and _comes_first(site, trainer):
                yield Reason.NOT_CALLED, f"{name} took a step without a call of {target.attribute}"


def _called(patch_id: str, target: str, trainer: Any) -> int:
    counts = counts_of(patch_id, target)
    count = counts.known(trainer)
    return counts.process.called + (count.called if count is not None else 0)


def _comes_first(site: Site, trainer: Any) -> bool:
    """Return whether a call of the method by this trainer comes to the patched one first.

    Whether a method that overrides it calls it is a question of ``conflicts``.
    """
    classes = type(trainer).__mro__
    if site.owner not in classes or site.name in vars(trainer):
        return False
    return not any(site.name in vars(cls) for cls in classes[: classes.index(site.owner)])


def _looks_like(trainer: Any, owner: type) -> bool:
    """Return whether a class outside TRL has the name of TRL's trainer, or is used with its config."""
    classes = type(trainer).__mro__
    if classes[0].__module__.startswith("trl.") or not owner.__name__.endswith("Trainer"):
        return False
    names = {cls.__name__ for cls in classes}
    configs = {cls.__name__ for cls in type(getattr(trainer, "args", None)).__mro__}
    # A subclass of another of TRL's trainers may share a config with this one.
    own = any(cls.__module__.startswith("trl.") and cls.__name__.endswith("Trainer") for cls in classes)
    return not own and (owner.__name__ in names or f"{owner.__name__.removesuffix('Trainer')}Config" in configs)


def _concerns(patch: Patch, trainer: Any) -> bool:
    """Return whether the bug is said to be one of trainers with the name of this one's class, or of a base of it."""
    names = {cls.__name__.removesuffix("Trainer") for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")}
    return any(names & {*hit.trainers} or (names and "*" in hit.trainers) for hit in patch.hits)
