"""Put wrappers on, take them off exactly.

A site is one attribute of one class or module; it remembers the raw descriptor that was there, and the layers, one a
patch, that stand on it. Whenever the layers change, what is installed is built anew from the raw descriptor.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from . import references
from .model import Reason, Target, Wrapper
from .references import Reference

ABSENT = object()
"""In place of a raw descriptor: the attribute is inherited. Setting it back would change what the class defines."""


class MissingTargetError(LookupError):
    """The target is not in this release."""


class UnsupportedTargetError(TypeError):
    """The target is not a function, so there is nothing to wrap."""


class OccupiedError(RuntimeError):
    """The attribute does not hold our wrapper any more; taking off ours would undo somebody else's work."""

    def __init__(self, reason: Reason, by: str) -> None:
        self.reason, self.by = reason, by
        super().__init__(by)


@dataclass(frozen=True, slots=True)
class Layer:
    """One patch's wrapper on a site."""

    patch_id: str
    revision: int
    wrapper: Wrapper
    traced: bool
    options: tuple[tuple[str, str], ...] = ()


class _BoundHotfixWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    # Dynamo looks through a wrapt wrapper and traces the original; with this it takes a graph break and runs ours.
    _torchdynamo_disable = True

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        parent = self._self_parent
        return parent._self_restore, (parent._self_reference, self._self_instance)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        if self._self_instance is None:
            return self
        instance = copy.deepcopy(self._self_instance, memo)
        return self._self_parent.__get__(instance, type(instance))


_bind = wrapt.FunctionWrapper.__get__  # ``super()`` would cost 0.1 us a call


class HotfixWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapt wrapper that can be pickled, and that ``torch.compile`` does not look through.

    It pickles by a name of our own with the patches' ids, revisions and options in it: ``datasets`` hashes what it
    pickles, so data prepared by the unpatched function is not taken for the patched one's.
    """

    _torchdynamo_disable = True
    __bound_function_wrapper__ = _BoundHotfixWrapper

    def __init__(
        self, wrapped: Any, wrapper: Wrapper, restore: Callable[..., Any], reference: Reference, owner: Any
    ) -> None:
        super().__init__(wrapped, wrapper)
        self._self_restore = restore
        self._self_reference = reference
        # Always the same object, as with a function: cloudpickle writes down the code of the original otherwise.
        self._self_unbound: Any = _bind(self, None, owner) if isinstance(owner, type) else None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None and self._self_unbound is not None:
            return self._self_unbound
        return _bind(self, instance, owner)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._self_restore, (self._self_reference, None)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


@dataclass(slots=True, eq=False)
class Site:
    """One attribute of one class or module, and the patches that stand on it."""

    owner: Any
    name: str
    raw: Any
    inherited: Any
    restore: Callable[..., Any]
    layers: tuple[Layer, ...] = ()
    installed: Any = ABSENT
    names: set[tuple[str, str]] = field(default_factory=set)

    @property
    def original(self) -> Any:
        """The raw descriptor that TRL has here, inherited or not."""
        return self.inherited if self.raw is ABSENT else self.raw

    def put_on(self, layer: Layer) -> None:
        """Add ``layer``, outermost. Raises ``OccupiedError`` or ``UnsupportedTargetError``, with nothing changed."""
        self._set((*self._without(layer.patch_id), layer))

    def take_off(self, patch_id: str) -> None:
        """Remove a patch's layer; the last one leaves ``vars(owner)`` as it was. Raises ``OccupiedError``."""
        self._set(self._without(patch_id))

    def _without(self, patch_id: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.patch_id != patch_id)

    def has(self, patch_id: str) -> bool:
        return any(layer.patch_id == patch_id for layer in self.layers)

    def moved(self, held: Collection[Any]) -> OccupiedError | None:
        """Which other class stands where this one was found, or under its name in ``trl`` or ``trl.trainer``.

        A module may have been given a regenerated class since, or a reload one of its own: it must be one of ``held``,
        the classes that the patch is on, or a subclass of one.
        """
        for module, path in self.names:
            for surface in (module, "trl.trainer", "trl") if path else ():
                found: Any = vars(sys.modules.get(surface, object)).get(path, ABSENT)
                if not isinstance(found, type) or set(held) & set(found.__mro__):
                    continue
                # TRL has some names twice, each in a module of its own.
                if surface == module or vars(sys.modules.get(found.__module__, object)).get(path) is not found:
                    return OccupiedError(Reason.REPLACED, f"{surface}.{path} is another class, {describe_owner(found)}")
        return None

    def reloaded(self) -> bool:
        """Has a reload of the module put its function there anew, over our wrapper? A class has a new site then."""
        found, original = vars(self.owner).get(self.name), self.original
        if not self.layers or found in (self.installed, original) or not isinstance(self.owner, ModuleType):
            return False
        if not (type(found) is type(original) is FunctionType):
            return False
        where = found.__module__, found.__qualname__, found.__code__.co_filename
        return where == (original.__module__, original.__qualname__, original.__code__.co_filename)

    def start_over(self) -> None:
        """Take the function that a reload has put there for the original; also where the old one is held by value."""
        held, self.installed, self.layers = self.installed, ABSENT, ()
        self._rebind(held, vars(self.owner)[self.name])

    def occupied(self) -> OccupiedError | None:
        """Who holds the attribute, if it is neither TRL's own nor our wrapper."""
        found = vars(self.owner).get(self.name, ABSENT)
        expected = self.installed if self.layers else self.raw
        if found is expected:
            return None
        if found is ABSENT:
            return OccupiedError(Reason.DELETED, f"{describe_owner(self.owner)}.{self.name} was deleted")
        return OccupiedError(Reason.REPLACED, describe(found))

    def _set(self, layers: tuple[Layer, ...]) -> None:
        occupied = self.occupied()
        if occupied is not None:
            raise occupied
        before, after = (self.installed if self.layers else self.original), self.original
        if layers:
            after = self._build(layers)
            setattr(self.owner, self.name, after)
        elif self.layers and self.raw is ABSENT:
            delattr(self.owner, self.name)
        elif self.layers:
            setattr(self.owner, self.name, self.raw)
        self.layers, self.installed = layers, after if layers else ABSENT
        if isinstance(self.owner, ModuleType) and self.original.__module__ == self.owner.__name__:
            self._rebind(before, after)

    def _rebind(self, before: Any, after: Any) -> None:
        """Follow ``from .utils import f``: other modules of TRL hold the function by value."""
        for name, module in list(sys.modules.items()):
            # sys.modules may hold None for a name that must not be imported.
            if module is self.owner or not isinstance(module, ModuleType) or not f"{name}.".startswith("trl."):
                continue
            for key, value in list(vars(module).items()):
                if value is before:
                    setattr(module, key, after)

    def _build(self, layers: tuple[Layer, ...]) -> Any:
        raw = self.original
        bound = isinstance(self.owner, type) and not isinstance(raw, staticmethod)
        function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        if not isinstance(function, FunctionType):
            raise UnsupportedTargetError(f"{describe_owner(self.owner)}.{self.name} is {describe(raw)}, not a function")
        reference = (
            *_path(self.owner, self.name),
            tuple((each.patch_id, each.revision, each.options) for each in layers),
        )
        *inner, outer = layers
        for layer in inner:
            function = _plain(function, layer.wrapper, bound=bound)
        if isinstance(raw, FunctionType) and not any(layer.traced for layer in layers):
            return HotfixWrapper(function, outer.wrapper, self.restore, reference, self.owner)
        # Static and class methods too: Dynamo looks through a wrapt wrapper of theirs whatever it is marked with.
        plain = _plain(function, outer.wrapper, bound=bound)
        plain.__module__, plain.__qualname__ = references.__name__, references.name_of(reference)
        return plain if isinstance(raw, FunctionType) else type(raw)(plain)


class Sites:
    """The sites of this process; the same class reached under two names is one site."""

    def __init__(self, restore: Callable[..., Any]) -> None:
        self._restore = restore
        self._sites: dict[tuple[Any, str], Site] = {}

    def at(self, module: ModuleType, target: Target) -> Site:
        """The site of ``target``. Raises ``MissingTargetError``."""
        *owners, name = target.attribute.split(".")
        owner: Any = module
        for step in owners:
            owner = getattr(owner, step, ABSENT)
        if owner is ABSENT or not isinstance(owner, (type, ModuleType)) or not hasattr(owner, name):
            raise MissingTargetError(f"{target.module} has no {target.attribute}")
        site = self._sites.get((owner, name))
        if site is None:
            site = self._sites[owner, name] = Site(owner, name, ABSENT, ABSENT, self._restore)
        site.names.add((module.__name__, ".".join(owners)))
        if site.reloaded():
            site.start_over()
        if not site.layers:
            # Nothing of ours is on it: whatever stands there now is what it was.
            bases = owner.__mro__[1:] if isinstance(owner, type) else ()
            site.raw = vars(owner).get(name, ABSENT)
            site.inherited = next((vars(base)[name] for base in bases if name in vars(base)), ABSENT)
        return site


def describe(raw: Any) -> str:
    """A raw descriptor in words: what it is and where its code stands."""
    function = getattr(raw, "__func__", raw)
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    kind = "" if type(raw) is FunctionType else f"{type(raw).__module__}.{type(raw).__qualname__} "
    named = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    return f"{kind}{named}{where}"


def describe_owner(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"


def _path(owner: Any, name: str) -> tuple[str, str]:
    if isinstance(owner, ModuleType):
        return owner.__name__, name
    return owner.__module__, f"{owner.__qualname__}.{name}"


def _plain(raw: Any, wrapper: Wrapper, *, bound: bool) -> FunctionType:
    """A plain function, which Dynamo traces, that calls ``wrapper`` around ``raw``."""

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # `raw.__get__` is an internal error in Dynamo on torch 2.6, and refused under fullgraph on 2.9.
        return wrapper(functools.partial(raw, self), self, args, kwargs)

    async def async_method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await wrapper(functools.partial(raw, self), self, args, kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        return wrapper(raw, None, args, kwargs)

    async def async_function(*args: Any, **kwargs: Any) -> Any:
        return await wrapper(raw, None, args, kwargs)

    kinds = (async_method if bound else async_function) if inspect.iscoroutinefunction(raw) else None
    plain = kinds or (method if bound else function)
    # Not __dict__: it drags `_torchdynamo_orig_callable` along (pytorch issue 172732).
    functools.update_wrapper(plain, raw, updated=())
    assert isinstance(plain, FunctionType)
    return plain
