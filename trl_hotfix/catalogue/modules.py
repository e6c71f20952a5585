"""Find the module that holds the wrappers and the self-test of a patch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..model import Options, Patch
from . import packs

PATCH_MODULES: set[str] = set()
"""Names of the modules that wrappers and self-tests have been taken from."""


def module_of(patch_id: str) -> str:
    """Return the name of the module that holds the wrappers and the self-test of a patch. It is made from the id."""
    pack, _, name = patch_id.rpartition("/")
    package = packs.find(pack).package if pack else __package__.partition(".")[0]
    return f"{package}.patches.{name.replace('-', '_')}"


def function_of(patch: Patch, name: str, options: Options) -> Callable[..., Any]:
    """Return a wrapper or the self-test of ``patch`` by its name in the catalogue, bound to the user's options."""
    module = import_module(module_of(patch.id))
    PATCH_MODULES.add(module.__name__)
    function: Callable[..., Any] = getattr(module, name)
    return functools.partial(function, options=patch.chosen(options)) if patch.options else function
