"""Detect other code that has wrapped, replaced, deleted or overridden a target."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
from collections.abc import Collection, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from ..model import Patch, Reason
from .libraries import is_of_trl
from .reach import instances_of, is_stand_in, is_trainer, subclasses, trainer_classes
from .sites import MISSING, OccupiedError, Site, describe_owner
from .wrappers import describe, reference_of

_LONGEST_CHAIN = 32
"""The number of wrappers on one method that are followed. A longer chain is most likely a circle."""


def foreign(site: Site) -> str | None:
    """Describe the code that wrapped or replaced the target before us. Return None if the target is TRL's own."""
    if site.layers:
        occupied = site.occupied()
        return None if occupied is None else occupied.by
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


def overridden(site: Site, objects: Iterable[object], patch: Patch) -> list[str]:
    """Describe the methods that are called instead of this one and never call it.

    They are those of classes outside TRL, which are subclasses of the patched one or bases that come before it in such
    a subclass, and those that are attributes of an instance in ``objects``. Where TRL's class inherits the method, such
    a subclass may also have a base that comes before the one it is from. TRL's own subclasses have methods of their
    own that may not have the bug: they count if an instance exists, and the bug is said to be one of its name.
    """
    if not isinstance(site.owner, type):
        return []
    descriptions: dict[str, None] = {}
    in_use = {type(instance) for instance in objects if is_trainer(instance)}
    concerned = {f"{trainer}Trainer" for hit in patch.hits for trainer in hit.trainers}
    for subclass in subclasses(site.owner):
        for base in _in_between(site, subclass):
            raw = vars(base).get(site.name, MISSING)
            exempt = is_stand_in(base) or (
                f"{base.__module__}.".startswith("trl.") and not (subclass in in_use and base.__name__ in concerned)
            )
            if raw is not MISSING and not exempt and not _calls(raw, site, subclass):
                descriptions[f"{base.__module__}.{base.__qualname__}.{site.name}"] = None
    for instance in objects:
        cls = type(instance)
        raw = vars(instance).get(site.name, MISSING) if issubclass(cls, site.owner) else MISSING
        if raw is not MISSING and not is_stand_in(cls) and not _calls(raw, site, cls):
            descriptions[f"{site.name} of an instance of {describe_owner(cls)}: {describe(raw)}"] = None
    return list(descriptions)


def _in_between(site: Site, subclass: type) -> list[type]:
    """Return the classes whose method a call of ``subclass`` comes to before it has been through ours and TRL's."""
    classes = list(subclass.__mro__)
    before = classes[: classes.index(site.owner)]
    if site.is_own:
        return before
    bases = site.owner.__mro__[1:]
    home = next((base for base in bases if site.name in vars(base)), object)
    behind = classes[len(before) + 1 : classes.index(home)]
    return before + [base for base in behind if base not in bases]


def objects_of(sites: Iterable[Site]) -> list[object]:
    """Return all objects of the classes of these sites, and all trainers."""
    owners = {site.owner for site in sites if isinstance(site.owner, type)}
    classes = {cls for owner in owners for cls in (owner, *subclasses(owner))}
    return instances_of(classes | trainer_classes())


def _calls(raw: Any, site: Site, inheriting: type | None = None, *, beneath: bool = False) -> bool:
    """Return whether ``raw``, which is found in place of our wrapper, calls our wrapper, as far as its code tells.

    With ``beneath`` it is found in place of what the class inherited when the wrapper was built, and may call that.

    It does if our wrapper is in its closure, its defaults, a global variable or an attribute of the class that it
    names. In an ``inheriting`` class it also does if it names the method, and ``super`` or the class. The
    ``__wrapped__`` of a plain function is no evidence: ``functools.wraps`` is also used to look like the original only.
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
        if (
            inheriting is not None
            and names & {site.name, "getattr"}
            and _calls_base(candidate.__code__, names, site.owner, inheriting)
        ):
            return True
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


def _calls_base(code: CodeType, names: set[str], owner: type, inheriting: type) -> bool:
    """Return whether a method with this code calls the method of a base, without passing over that of ``owner``."""
    if "super" in names:
        arguments = [instruction.argval for instruction in dis.get_instructions(code)]
        # `super(DPOTrainer, self)` begins after DPOTrainer.
        return ("super", owner.__name__) not in itertools.pairwise(arguments)
    return any(base.__name__ in names for base in inheriting.__mro__[: inheriting.__mro__.index(owner) + 1])


def _closure_values(function: FunctionType) -> list[Any]:
    """Return the values in a function's closure. Cells without a value yet are left out."""
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
