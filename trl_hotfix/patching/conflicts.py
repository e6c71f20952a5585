"""Detect other code that has wrapped, replaced or deleted a target."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from ..model import Reason
from .libraries import is_of_trl
from .reach import instances_of, subclasses, trainer_classes
from .sites import MISSING, OccupiedError, Site, describe_owner
from .wrappers import describe, reference_of

_LONGEST_CHAIN = 32
"""The number of wrappers on one method that are followed. A longer chain is most likely a circle."""


def foreign(site: Site) -> str | None:
    """Describe the code that wrapped or replaced the target before us. Return None if the target is TRL's own."""
    occupied = site.occupied() if site.layers else None
    if occupied is not None:
        return occupied.by
    function = getattr(site.original, "__func__", site.original)
    if not callable(function):
        return None  # A property or a value of TRL is not a wrapper, and cannot be wrapped either.
    for _ in range(_LONGEST_CHAIN):
        if function is None:
            return None
        if type(function) is not FunctionType or not is_of_trl(function):
            return describe(function)
        function = vars(function).get("__wrapped__")
    return f"more than {_LONGEST_CHAIN} functions, each wrapped in the next"


def still_on(site: Site, patched_classes: Collection[Any]) -> str | None:
    """Return None if our wrapper is the attribute, or a description of the code on top that calls our wrapper.

    ``patched_classes`` are the classes that the patch is on. Raises ``OccupiedError`` if no call reaches our wrapper.
    """
    moved, occupied = site.moved(patched_classes), site.occupied()
    if moved is not None:
        raise moved
    inherited = site.original if site.is_own else site.now_inherited()
    if inherited is not site.original and not _calls(inherited, site, beneath=True):
        raise OccupiedError(Reason.REPLACED, f"a base of {describe_owner(site.owner)} has {describe(inherited)}")
    if occupied is None:
        return None
    on_top: Any = vars(site.owner).get(site.name, MISSING)
    if not _calls(on_top, site):
        raise occupied
    return describe(on_top)


def objects_of(sites: Iterable[Site]) -> list[object]:
    """Return all objects of the classes of these sites, and all trainers."""
    owners = {site.owner for site in sites if isinstance(site.owner, type)}
    classes = {cls for owner in owners for cls in (owner, *subclasses(owner))}
    return instances_of(classes | trainer_classes())


def _calls(raw: Any, site: Site, *, beneath: bool = False) -> bool:
    """Return whether ``raw``, which is found in place of our wrapper, calls our wrapper, as far as its code tells.

    With ``beneath`` it is found in place of what the class inherited when the wrapper was built, and may call that.

    It does if our wrapper is in its closure, its defaults, a global variable or an attribute of the class that it
    names. The ``__wrapped__`` of a plain function is no evidence: ``functools.wraps`` is also used to look like the
    original only.
    """
    waiting, count = [raw], 0
    while waiting and count < 100:
        candidate, count = waiting.pop(), count + 1
        if _is_our_wrapper(candidate, site) or (beneath and candidate is site.original):
            return True
        if type(candidate) is not FunctionType:
            # It may be a bound, static or class method, a partial or a wrapper object.
            inner = (getattr(candidate, name, None) for name in ("__func__", "func", "__wrapped__"))
            waiting += [function for function in inner if isinstance(function, _HOLDERS)]
            continue
        names = _names(candidate.__code__)
        namespaces = (
            candidate.__globals__,
            {key: value for key, value in vars(site.owner).items() if key != site.name},
        )
        if any(_is_our_wrapper(namespace.get(name), site) for namespace in namespaces for name in names):
            return True
        defaults = [*(candidate.__defaults__ or ()), *(candidate.__kwdefaults__ or {}).values()]
        waiting += [value for value in (*_closure_values(candidate), *defaults) if isinstance(value, _HOLDERS)]
    return False


_HOLDERS = (FunctionType, MethodType, staticmethod, classmethod, functools.partial, functools.partialmethod)
"""Types that may hold a function and call it. A wrapt wrapper is an instance of the type that it wraps."""


def _is_our_wrapper(value: Any, site: Site) -> bool:
    """Return whether ``value`` is the installed wrapper, either the raw descriptor or the bound one."""
    if isinstance(value, _HOLDERS):
        installed = site.installed
        function = getattr(installed, "__func__", installed)
        if value is installed or value is function:
            return True
        # A bound wrapper that was kept while the same patches went off and on again is equivalent.
        reference = reference_of(value)
        return reference is not None and reference == reference_of(installed)
    return False


def _closure_values(function: FunctionType) -> list[Any]:
    """Return the values in a function's closure. It leaves out cells without a value yet."""
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and the functions inside it look up."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
