"""The module under whose name a patched plain function is pickled: its attributes are ``references``."""

from __future__ import annotations

from typing import Any

from . import references
from .engine import restore


def __getattr__(name: str) -> Any:
    reference = references.parsed(name)
    if reference is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    restored = restore(reference, None)
    # A class method is given bound to its class; what goes by this name is the function.
    return getattr(restored, "__func__", restored)
