"""Who else has wrapped, replaced or deleted a target."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FunctionType
from typing import Any

from .install import ABSENT, Site, describe

OWN_PACKAGES = ("trl", "transformers", "torch", "accelerate")
"""A trainer's methods and their decorators (``torch.no_grad``, TRL's ``profiling_decorator``) come from these."""

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
    occupied = site.occupied()
    if occupied is None:
        return None
    on_top: Any = vars(site.owner).get(site.name, ABSENT)
    beneath, seen = on_top, 0
    while beneath is not site.installed and seen < 32:
        beneath, seen = getattr(getattr(beneath, "__func__", beneath), "__wrapped__", None), seen + 1
        if beneath is None:
            raise occupied
    return describe(on_top)


def _own(function: FunctionType) -> bool:
    path = os.path.realpath(function.__code__.co_filename)
    if path in map(os.path.realpath, OWN_STANDARD):
        return True
    return any(path.startswith(folder + os.sep) for folder in map(_folder, OWN_PACKAGES) if folder)


def _folder(package: str) -> str | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.dirname(os.path.realpath(file)) if file else None
