"""Who else has wrapped, replaced or deleted a target."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
from collections.abc import Collection, Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any

from ..catalogue.modules import PATCH_MODULES
from .libraries import is_of_trl
from .sites import MISSING, Site, describe_owner
from .wrappers import describe

_LONGEST_CHAIN = 32
"""Wrappers on one method that are followed. Nobody has more, unless they go round in a circle."""

_STAND_INS = f"{__package__.partition('.')[0]}.testing."
"""Where the trainers of self-tests are made."""


def foreign(site: Site) -> str | None:
    """Return who has wrapped or replaced the target before us, or None while it is TRL's own."""
    if site.layers:
        occupied = site.occupied()
        return None if occupied is None else occupied.by
    function = getattr(site.original, "__func__", site.original)
    if not callable(function):
        return None  # A property or a value of TRL's: nobody's wrapper, and nothing to wrap either.
    for _ in range(_LONGEST_CHAIN):
        if function is None:
            return None
        if type(function) is not FunctionType or not is_of_trl(function):
            return describe(function)
        function = vars(function).get("__wrapped__")
    return f"more than {_LONGEST_CHAIN} functions, each wrapped in the next"


def still_on(site: Site, held: Collection[Any]) -> str | None:
    """For a site that we hold: None if our wrapper is the attribute, or who stands on top of it and calls it.

    ``held`` are all the classes that the patch is on. Raises ``OccupiedError`` where our wrapper is not reached.
    """
    moved, occupied = site.moved(held), site.occupied()
    if moved is not None:
        raise moved
    if occupied is None:
        return None
    on_top: Any = vars(site.owner).get(site.name, MISSING)
    if not _calls(on_top, site):
        raise occupied
    return describe(on_top)


def overridden(site: Site, objects: Iterable[object]) -> list[str]:
    """Who stands before this method and never calls it: classes outside TRL, and those of ``objects`` with their own.

    A class is a subclass of the one that we hold, or another base of such a subclass, which comes first there.
    """
    if not isinstance(site.owner, type):
        return []
    found: dict[str, None] = {}
    for each in _subclasses(site.owner):
        for base in each.__mro__[: each.__mro__.index(site.owner)]:
            raw = vars(base).get(site.name, MISSING)
            its = f"{base.__module__}.".startswith("trl.") or _stands_in(base)
            if raw is not MISSING and not its and not _calls(raw, site, each):
                found[f"{base.__module__}.{base.__qualname__}.{site.name}"] = None
    for one in objects:
        kind = type(one)
        raw = vars(one).get(site.name, MISSING) if issubclass(kind, site.owner) else MISSING
        if raw is not MISSING and not _stands_in(kind) and not _calls(raw, site, kind):
            found[f"{site.name} of an instance of {describe_owner(kind)}: {describe(raw)}"] = None
    return list(found)


def objects_of(sites: Iterable[Site]) -> list[object]:
    """All objects of the classes of these sites. One look through what the garbage collector knows: some 30 ms."""
    owners = {site.owner for site in sites if isinstance(site.owner, type)}
    classes = {each for owner in owners for each in (owner, *_subclasses(owner))}
    # By the type: a proxy, asked for its class, may answer with another's.
    return [each for each in gc.get_referrers(*classes) if type(each) in classes and hasattr(each, "__dict__")]


def _stands_in(kind: type) -> bool:
    """Is this a self-test's stand-in for a trainer? It is there until the garbage collector comes by."""
    return f"{kind.__module__}.".startswith(_STAND_INS) or kind.__module__ in PATCH_MODULES


def _subclasses(owner: type) -> list[type]:
    direct: list[type] = type.__subclasses__(owner)
    return direct + [each for one in direct for each in _subclasses(one)]


def _calls(raw: Any, site: Site, inheriting: type | None = None) -> bool:
    """Whether ``raw``, which somebody has put where our wrapper is looked for, calls our wrapper. Read from its code.

    It does if it has ours in its closure, its defaults, a global variable or an attribute of the class that it names;
    in an ``inheriting`` class also if it names the method, and ``super`` or the class. The ``__wrapped__`` of a plain
    function says nothing: ``functools.wraps`` is also used by those who only want to look like the original.
    """
    waiting, seen = [raw], 0
    while waiting and seen < 100:
        each, seen = waiting.pop(), seen + 1
        if _is_ours(each, site):
            return True
        if type(each) is not FunctionType:
            # A bound, static or class method, a partial, a wrapper object.
            beneath = (getattr(each, name, None) for name in ("__func__", "func", "__wrapped__"))
            waiting += [one for one in beneath if isinstance(one, _HOLDERS)]
            continue
        names = _names(each.__code__)
        if (
            inheriting is not None
            and names & {site.name, "getattr"}
            and _goes_on(each.__code__, names, site.owner, inheriting)
        ):
            return True
        places = (each.__globals__, {key: value for key, value in vars(site.owner).items() if key != site.name})
        if any(_is_ours(place.get(name), site) for place in places for name in names):
            return True
        held = [*_contents(each), *(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
        waiting += [one for one in held if isinstance(one, _HOLDERS)]
    return False


_HOLDERS = (FunctionType, MethodType, staticmethod, classmethod, functools.partial, functools.partialmethod)
"""What may hold a function and call it. A wrapt wrapper says that it is what it wraps."""


def _is_ours(found: Any, site: Site) -> bool:
    """What is installed, as it lies in the class or as the class hands it out."""
    if isinstance(found, _HOLDERS):
        installed = site.installed
        function = getattr(installed, "__func__", installed)
        if found is installed or found is function:
            return True
        # A bound one that somebody kept, from before the same patches went off and on again, is as good.
        reference = getattr(getattr(found, "_self_parent", found), "_self_reference", None)
        return reference is not None and reference == getattr(installed, "_self_reference", None)
    return False


def _goes_on(code: CodeType, names: set[str], owner: type, inheriting: type) -> bool:
    """Whether a method with this code goes on to what stands behind it, and not past ``owner``."""
    if "super" in names:
        steps = [step.argval for step in dis.get_instructions(code)]
        # `super(DPOTrainer, self)` begins behind DPOTrainer.
        return ("super", owner.__name__) not in itertools.pairwise(steps)
    return any(base.__name__ in names for base in inheriting.__mro__[: inheriting.__mro__.index(owner) + 1])


def _contents(function: FunctionType) -> list[Any]:
    """What a function closes over, without what is not there yet."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def _names(code: CodeType) -> set[str]:
    """The names that a function looks up, those within it included."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
