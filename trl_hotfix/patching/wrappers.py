"""Build the object that replaces a target: a wrapt wrapper, or a plain function if ``torch.compile`` must see one."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import wrapt

from ..model import Wrapper
from . import references
from .references import Reference


class UnsupportedTargetError(TypeError):
    """The target is not a function, so there is nothing to wrap."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One patch's wrapper on a site."""

    patch_id: str
    revision: int
    wrapper: Wrapper
    traced: bool
    options: tuple[tuple[str, str], ...] = ()


class _BoundHotfixWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    # Without this mark Dynamo looks through a wrapt wrapper and traces the original. With it, it breaks the graph.
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


_bind = wrapt.FunctionWrapper.__get__  # ``super()`` would cost 0.1 us a call.


class HotfixWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapt wrapper that can be pickled, and that ``torch.compile`` does not look through.

    Its pickle has the patches' ids, revisions and options. ``datasets`` hashes pickles, so data prepared by the
    unpatched function is not reused for the patched one.
    """

    _torchdynamo_disable = True
    __bound_function_wrapper__ = _BoundHotfixWrapper

    def __init__(
        self, wrapped: Any, wrapper: Wrapper, restore: Callable[..., Any], reference: Reference, owner: Any
    ) -> None:
        super().__init__(wrapped, wrapper)
        self._self_restore = restore
        self._self_reference = reference
        # It must always be the same object, as with a function. Otherwise cloudpickle pickles the original's code.
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


def wrapped_descriptor(
    raw: Any, layers: tuple[Layer, ...], owner: Any, path: tuple[str, str], restore: Callable[..., Any]
) -> Any:
    """Return the replacement of the descriptor ``raw``, with the last layer outermost.

    ``path`` is its module and attribute. Raises ``UnsupportedTargetError``.
    """
    bound = isinstance(owner, type) and not isinstance(raw, staticmethod)
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if not isinstance(function, FunctionType):
        raise UnsupportedTargetError(f"{'.'.join(path)} is {describe(raw)}, not a function")
    reference = (*path, tuple((layer.patch_id, layer.revision, layer.options) for layer in layers))
    *inner, outer = layers
    for layer in inner:
        function = _plain_function(function, layer.wrapper, bound=bound)
    if isinstance(raw, FunctionType) and not any(layer.traced for layer in layers):
        return HotfixWrapper(function, outer.wrapper, restore, reference, owner)
    # Static and class methods are plain functions too: Dynamo looks through their wrapt wrappers despite the mark.
    plain = _plain_function(function, outer.wrapper, bound=bound)
    plain.__module__, plain.__qualname__ = references.MODULE, references.name_of(reference)
    return plain if isinstance(raw, FunctionType) else type(raw)(plain)


def _plain_function(raw: Any, wrapper: Wrapper, *, bound: bool) -> FunctionType:
    """Return a plain function, which Dynamo traces, that calls ``wrapper`` around ``raw``."""

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # `raw.__get__` is an internal error in Dynamo on torch 2.6, and is refused under fullgraph on 2.9.
        return wrapper(functools.partial(raw, self), self, args, kwargs)

    async def async_method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await wrapper(functools.partial(raw, self), self, args, kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        return wrapper(raw, None, args, kwargs)

    async def async_function(*args: Any, **kwargs: Any) -> Any:
        return await wrapper(raw, None, args, kwargs)

    coroutine = (async_method if bound else async_function) if inspect.iscoroutinefunction(raw) else None
    plain = coroutine or (method if bound else function)
    # __dict__ is not updated, since it would copy `_torchdynamo_orig_callable` (pytorch issue 172732).
    functools.update_wrapper(plain, raw, updated=())
    assert isinstance(plain, FunctionType)
    return plain


def describe(raw: Any) -> str:
    """Describe a raw descriptor: its type, its name and the location of its code."""
    function = getattr(raw, "__func__", raw)
    code = getattr(function, "__code__", None)
    location = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    kind = "" if type(raw) is FunctionType else f"{type(raw).__module__}.{type(raw).__qualname__} "
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    return f"{kind}{name}{location}"
