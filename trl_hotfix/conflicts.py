"""Who else has wrapped, replaced or deleted a target."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from types import CodeType, FunctionType
from typing import Any

from .install import ABSENT, Site, describe

OWN_PACKAGES = ("trl", "transformers", "torch", "accelerate", "huggingface_hub")
"""A trainer's methods and their decorators come from these.

``torch.no_grad``, TRL's ``profiling_decorator`` and, on constructors up to 0.12, huggingface_hub's
``_deprecate_arguments``.
"""

OWN_STANDARD = (functools.__file__, contextlib.__file__)


def foreign(site: Site) -> str | None:
    """Who has wrapped or replaced the target before us, or None while it is TRL's own."""
    if site.layers:
        occupied = site.occupied()
        return None if occupied is None else occupied.by
    function = getattr(site.original, "__func__", site.original)
    if not callable(function):
        return None  # a property or a value of TRL's: nobody's wrapper, and nothing to wrap either
    seen = 0
    while function is not None and seen < 32:
        if not isinstance(function, FunctionType) or type(function) is not FunctionType:
            return describe(function)
        if not _own(function):
            return describe(function)
        function = vars(function).get("__wrapped__")
        seen += 1
    return None


def still_on(site: Site) -> str | None:
    """For a site that we hold: None if our wrapper is the attribute, or who stands on top of it.

    Raises ``OccupiedError`` if it is neither there nor beneath what is there.
    """
    moved, occupied = site.moved(), site.occupied()
    if moved is not None:
        raise moved
    if occupied is None:
        return None
    on_top: Any = vars(site.owner).get(site.name, ABSENT)
    beneath, seen = on_top, 0
    while beneath is not site.installed and seen < 32:
        beneath, seen = getattr(getattr(beneath, "__func__", beneath), "__wrapped__", None), seen + 1
        if beneath is None:
            raise occupied
    return describe(on_top)


def overridden(site: Site) -> list[str]:
    """The classes outside TRL that define this method anew and never call the one they inherit.

    Found by their code: whoever calls ``super()``, or the class by name, names one of the two.
    """
    if not isinstance(site.owner, type):
        return []
    found: list[str] = []
    waiting: list[type] = list(site.owner.__subclasses__())
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        raw = vars(each).get(site.name)
        function = inspect.unwrap(getattr(raw, "__func__", raw)) if raw is not None else None
        if not isinstance(function, FunctionType) or f"{each.__module__}.".startswith("trl."):
            continue
        if not _names(function.__code__) & {"super", *(base.__name__ for base in each.__mro__[1:])}:
            found.append(f"{each.__module__}.{each.__qualname__}.{site.name}")
    return found


def _names(code: CodeType) -> set[str]:
    """The names that a function looks up, those within it included; ``__class__`` is what ``super()`` closes over."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def compiled_before(site: Site, traced: bool) -> str:
    """What Dynamo had compiled before this site was patched; empty where that cannot matter.

    Code that is compiled already holds the function that it has inlined, until ``torch._dynamo.reset()``.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    captured = dynamo.counters["stats"]["unique_graphs"] if traced and dynamo is not None else 0
    return f"{captured} compiled graphs; torch._dynamo.reset() drops them" if captured else ""


def _own(function: FunctionType) -> bool:
    path = os.path.realpath(function.__code__.co_filename)
    if path in map(os.path.realpath, OWN_STANDARD):
        return True
    return any(path.startswith(folder + os.sep) for folder in map(_folder, OWN_PACKAGES) if folder)


def _folder(package: str) -> str | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.dirname(os.path.realpath(file)) if file else None
