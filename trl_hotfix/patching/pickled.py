"""A patched plain function is pickled as an attribute of this module, whose name is one of ``references``."""

from __future__ import annotations

from typing import Any

from . import references
from .engine import restore


def __getattr__(name: str) -> Any:
    reference = references.parsed(name)
    if reference is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    restored = restore(reference)
    # A class method is restored bound to its class, but the name stands for the function.
    return getattr(restored, "__func__", restored)
