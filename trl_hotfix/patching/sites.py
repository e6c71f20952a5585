"""Put wrappers on, and take them off exactly.

A site is one attribute of one class or module. It keeps the raw descriptor that TRL has there, and the layers on it,
one for each patch. When the layers change, the site builds the installed wrapper again from the raw descriptor.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from ..model import Reason, Target
from ..witness import stands
from .inheritance import SITE, site_of
from .wrappers import Layer, describe, wrapped_descriptor

INHERITED = object()
"""Stands for a raw descriptor: the attribute is inherited. Setting it back would define it in the class itself."""

NOT_INSTALLED = object()
"""Stands for the installed wrapper: none of our wrappers is on the site."""

MISSING = object()
"""The result of a failed look-up."""

_CHANGING = threading.RLock()
"""Held while an attribute and the site that describes it change together, or are compared. Nobody imports meanwhile.

Another thread would take our own wrapper for TRL's function between the two.
"""

if hasattr(os, "register_at_fork"):
    # A child has no other thread, which could leave a change half done or the lock taken.
    os.register_at_fork(before=_CHANGING.acquire, after_in_parent=_CHANGING.release, after_in_child=_CHANGING.release)


class MissingTargetError(LookupError):
    """The target is not in this release."""


class OccupiedError(RuntimeError):
    """The attribute does not hold our wrapper any more. Taking it off would undo a change by other code."""

    def __init__(self, reason: Reason, by: str) -> None:
        self.reason, self.by = reason, by
        super().__init__(by)


@dataclass(eq=False)
class Site:
    """One attribute of one class or module, and the patches on it."""

    owner: Any
    name: str
    raw: Any
    inherited: Any
    layers: tuple[Layer, ...] = ()
    installed: Any = NOT_INSTALLED
    names: set[tuple[str, str]] = field(default_factory=set)
    """The modules and paths under which the owner was found."""

    @property
    def original(self) -> Any:
        """The raw descriptor that TRL has here, inherited or not."""
        return self.raw if self.is_own else self.inherited

    @property
    def is_own(self) -> bool:
        """Whether the owner defines the attribute itself. Otherwise it inherits it, perhaps from transformers."""
        return self.raw is not INHERITED

    def now_inherited(self) -> Any:
        """Return what the owner inherits at present, beneath our wrappers, or ``MISSING``."""
        bases = self.owner.__mro__[1:] if isinstance(self.owner, type) else ()
        raw = next((vars(base)[self.name] for base in bases if self.name in vars(base)), MISSING)
        site = site_of(raw)
        return raw if site is None else site.original

    def put_on(self, layer: Layer) -> None:
        """Add ``layer``. Layers lie in the order of ids, whatever went on first, and one of phases is the outermost.

        On ``OccupiedError`` or ``UnsupportedTargetError`` nothing has changed.
        """
        with _CHANGING:
            layers = (*self._without(layer.patch_id), layer)
            self._set(tuple(sorted(layers, key=lambda each: (each.phase is not None, each.patch_id))))

    def take_off(self, patch_id: str) -> None:
        """Remove a patch's layer. Without layers ``vars(owner)`` is as it was before. Raises ``OccupiedError``."""
        with _CHANGING:
            self._set(self._without(patch_id))

    def clear(self) -> None:
        """Remove all layers. Raises ``OccupiedError``."""
        with _CHANGING:
            self._set(())

    def _without(self, patch_id: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.patch_id != patch_id)

    def has(self, patch_id: str) -> bool:
        return any(layer.patch_id == patch_id for layer in self.layers)

    def moved(self, patched_classes: Collection[Any]) -> OccupiedError | None:
        """Return an error if another class has replaced the owner in its module, or in ``trl`` or ``trl.trainer``.

        Another library may have generated the class again, or a reload may have defined it again. It must be one of
        ``patched_classes``, which have the patch, or a subclass of one.
        """
        for module, path in self.names:
            for surface in (module, "trl.trainer", "trl") if path else ():
                current: Any = vars(sys.modules.get(surface, object)).get(path, MISSING)
                if not isinstance(current, type) or set(patched_classes) & set(current.__mro__):
                    continue
                # TRL has two classes of the same name in different modules.
                if surface == module or vars(sys.modules.get(current.__module__, object)).get(path) is not current:
                    by = f"{surface}.{path} is another class, {describe_owner(current)}"
                    return OccupiedError(Reason.REPLACED, by)
        return None

    def reloaded(self) -> bool:
        """Return whether a reload of the module has put a new function in place of our wrapper.

        A reloaded class has a new site.
        """
        current, original = vars(self.owner).get(self.name), self.original
        if not self.layers or current in (self.installed, original) or not isinstance(self.owner, ModuleType):
            return False
        if not (type(current) is type(original) is FunctionType):
            return False
        source = current.__module__, current.__qualname__, current.__code__.co_filename
        return source == (original.__module__, original.__qualname__, original.__code__.co_filename)

    def is_of_class_before_reload(self, module: ModuleType) -> bool:
        """Return whether a reload of ``module`` has defined the class again."""
        if not isinstance(self.owner, type) or self.owner.__module__ != module.__name__:
            return False
        current = getattr(module, self.owner.__qualname__.split(".")[0], None)
        return (
            isinstance(current, type)
            and current is not self.owner
            and (current.__module__, current.__qualname__) == (self.owner.__module__, self.owner.__qualname__)
        )

    def start_over(self) -> None:
        """Take the reloaded function as the original, also in modules that hold the old one by value."""
        for layer in self.layers:
            stands(layer.witnessed, self, on=False)
        old, self.installed, self.layers = self.installed, NOT_INSTALLED, ()
        self._rebind(old, vars(self.owner)[self.name])

    def occupied(self) -> OccupiedError | None:
        """Return an error that names the attribute's present value, if it is neither TRL's own nor our wrapper."""
        with _CHANGING:
            current = vars(self.owner).get(self.name, INHERITED)
            expected = self.installed if self.layers else self.raw
        if current is expected:
            return None
        if current is INHERITED:
            return OccupiedError(Reason.DELETED, f"{describe_owner(self.owner)}.{self.name} was deleted")
        return OccupiedError(Reason.REPLACED, describe(current))

    def _set(self, layers: tuple[Layer, ...]) -> None:
        occupied = self.occupied()
        if occupied is not None:
            raise occupied
        before, after = (self.installed if self.layers else self.original), self.original
        if layers:
            path = _path(self.owner, self.name)
            after = wrapped_descriptor(self.original, layers, self.owner, path, inherited=not self.is_own)
            # A class that a reload has replaced keeps its sites alive itself, and nothing else does.
            vars(getattr(after, "__func__", after))[SITE] = self
            setattr(self.owner, self.name, after)
        elif self.layers and not self.is_own:
            delattr(self.owner, self.name)
        elif self.layers:
            setattr(self.owner, self.name, self.raw)
        gone = self.layers
        self.layers, self.installed = layers, after if layers else NOT_INSTALLED
        for layer in gone:
            stands(layer.witnessed, self, on=False)
        for layer in layers:
            stands(layer.witnessed, self, on=True)
        if isinstance(self.owner, ModuleType) and self.original.__module__ == self.owner.__name__:
            self._rebind(before, after)

    def _rebind(self, before: Any, after: Any) -> None:
        """Replace the function in other modules of TRL too, which hold it by value after ``from .utils import f``."""
        for name, module in list(sys.modules.items()):
            # sys.modules may hold None for a name that must not be imported.
            if name.partition(".")[0] != "trl" or module is self.owner or not isinstance(module, ModuleType):
                continue
            for key, value in list(vars(module).items()):
                if value is before:
                    setattr(module, key, after)


class Sites:
    """The sites of this process. A class that is reached under two names has one site for each attribute.

    A site without layers is forgotten, so that its class can be collected after a reload. One with layers is kept by
    the installed function.
    """

    def __init__(self) -> None:
        self._sites: weakref.WeakValueDictionary[tuple[Any, str], Site] = weakref.WeakValueDictionary()
        self._forgotten: weakref.WeakSet[Site] = weakref.WeakSet()

    def at(self, module: ModuleType, target: Target) -> Site:
        """Return the site of ``target``. Raises ``MissingTargetError``."""
        *owners, name = target.attribute.split(".")
        owner: Any = module
        for step in owners:
            owner = getattr(owner, step, MISSING)
        if owner is MISSING or not isinstance(owner, (type, ModuleType)) or not hasattr(owner, name):
            raise MissingTargetError(f"{target.module} has no {target.attribute}")
        with _CHANGING:
            site = self._sites.get((owner, name))
            if site is None:
                site = self._sites[owner, name] = Site(owner, name, INHERITED, MISSING)
            site.names.add((module.__name__, ".".join(owners)))
            if site.reloaded():
                site.start_over()
            if not site.layers:
                # None of our wrappers is on it, so the present value is the original.
                site.raw = vars(owner).get(name, INHERITED)
                site.inherited = site.now_inherited()
        return site

    def clear(self) -> None:
        """Take all layers off that can be taken off."""
        for site in self._all():
            if site.layers:
                with suppress(OccupiedError):
                    site.clear()

    def forget(self, site: Site) -> None:
        """Forget a site of a class that a reload has replaced, so that the class can be collected."""
        with _CHANGING:
            self._sites.pop((site.owner, site.name), None)
            self._forgotten.add(site)

    def with_layer(self, name: str) -> list[Site]:
        """Return the sites that have the layer of this name, those of classes that a reload has replaced too."""
        return [site for site in self._all() if site.has(name)]

    def _all(self) -> list[Site]:
        # Another thread may add a site, and a dictionary that grows cannot be iterated over.
        with _CHANGING:
            return [*self._sites.values(), *self._forgotten]


def describe_owner(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _path(owner: Any, name: str) -> tuple[str, str]:
    if isinstance(owner, ModuleType):
        return owner.__name__, name
    return owner.__module__, f"{owner.__qualname__}.{name}"
