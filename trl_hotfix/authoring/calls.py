"""The call that a wrapper is given: its arguments, and the same call with something changed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from ..call import act


def argument(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the argument ``name`` of this call of ``wrapped``, however it was passed, or its default."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


@contextmanager
def shadowed(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``instance.name`` to ``value`` inside the block, and restore it afterwards.

    If the instance had no such attribute of its own before, it loses it afterwards. The wrapper that does this acts.
    """
    act()
    before = vars(instance).copy()
    setattr(instance, name, value)
    try:
        yield
    finally:
        if name in before:
            setattr(instance, name, before[name])
        else:
            delattr(instance, name)


def with_config(model: Any, config: Any) -> Any:
    """Return a view of a wrapped model (DeepSpeed engine, DDP) whose ``.config`` is ``config``.

    Everything else, calls included, is the model's own, so its hooks and its gradient synchronisation run as before.
    """
    import wrapt

    class ConfigView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        pass

    # A property of the view's class: an attribute set on a proxy would land on the model.
    ConfigView.config = property(lambda self: config)  # type: ignore[attr-defined]
    return ConfigView(model)


def called_with(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a view of ``model``, wrapped or not, whose calls are given ``change(keyword arguments)``.

    The call goes through everything that wraps the model (DDP, a DeepSpeed engine, FSDP, PEFT). A forward hook would do
    as well, but Dynamo does not look again whether it is still the same.
    """
    import wrapt

    class ChangedView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(*args, **change(kwargs))

    return ChangedView(model)


def module_of(wrapped: Callable[..., Any]) -> ModuleType:
    """Return the module that defines the function behind ``wrapped``.

    What another patch or another library has put on it may stand between the two, and may be of another module.
    """
    function: Any = wrapped
    while not isinstance(function, FunctionType):
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None) or function.func
    return sys.modules[inspect.unwrap(function).__module__]
