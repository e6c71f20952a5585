"""A patch on a method that TRL's class inherits: the wrapper becomes an attribute of that class alone.

Beneath it is whatever the class would have called without it. That is looked up in each call, as ``super()`` does: a
user's subclass may have another base in between, and other code may change the base later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

SITE = "_trl_hotfix_site"
"""The attribute of an installed function that has its site."""

Aside = Callable[[Any], bool]
"""Whether a layer leaves a call of this instance, or class, to the same patch on a base."""


def site_of(raw: Any) -> Any:
    """Return the site of an installed function, bound or not, or None if the function is not ours."""
    function = getattr(raw, "__func__", raw)
    return vars(function).get(SITE) if type(function) is FunctionType else None


def is_defined_by_trl(raw: Any) -> bool:
    """Return whether the function beneath all decorators is of a module of TRL, and not of transformers."""
    function = inspect.unwrap(getattr(raw, "__func__", raw))
    return f"{getattr(function, '__module__', None)}.".startswith("trl.")


def forwarding(owner: type, name: str, raw: Any) -> FunctionType:
    """Return a function that calls what ``owner`` inherits as ``name``: ``raw``, unless that has changed since."""
    function: Any = getattr(raw, "__func__", raw)

    def bound(instance: Any) -> Callable[..., Any]:
        if issubclass(instance, owner) if isinstance(instance, type) else isinstance(instance, owner):
            method: Callable[..., Any] = getattr(super(owner, instance), name)
            return method
        # A function is called with any object: `DPOTrainer.training_step(stub, model, inputs)`.
        return functools.partial(function, instance)

    def static(*args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, owner), name)(*args, **kwargs)

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return bound(self)(*args, **kwargs)

    async def coroutine(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return await bound(self)(*args, **kwargs)

    forward: Any = coroutine if inspect.iscoroutinefunction(function) else method
    forward = static if isinstance(raw, staticmethod) else forward
    functools.update_wrapper(forward, function, updated=())
    assert isinstance(forward, FunctionType)
    return forward


def leaves_to_a_base(owner: type, name: str, patch_id: str) -> Aside:
    """Return whether the patch is on the same method of a base that the call comes to: it acts there, and once."""

    def is_on_a_base(instance: Any) -> bool:
        classes = instance.__mro__ if isinstance(instance, type) else type(instance).__mro__
        for base in classes[classes.index(owner) + 1 :] if owner in classes else ():
            raw = vars(base).get(name)
            site = site_of(raw)
            if site is not None and site.has(patch_id):
                return True
            if raw is not None and (site is None or site.is_own):
                return False
        return False

    return is_on_a_base
