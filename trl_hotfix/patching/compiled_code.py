"""Find code that Dynamo compiled before a patch went on, which may have the unpatched method inlined."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

from .libraries import TRL_AND_BELOW, folder_of

Compiled = tuple[Any, ...]
"""Weak references to code that Dynamo has compiled. After ``torch._dynamo.reset()`` Dynamo has new ones."""


def compiled_now(*, traced: bool) -> Compiled:
    """Return the compiled code that may have a target's present function inlined, and would go on calling it.

    Dynamo does not record which functions it has inlined, so for a ``traced`` target this is all compiled code. Any
    other target is called by a trainer or the user's code: the compiled models of these libraries do not count.
    """
    references = _references()
    return tuple(ref for ref in references if (code := ref()) and (traced or not _of_a_model(code)))


def still_compiled(before: Compiled) -> str:
    """Describe the code in ``before`` that is still compiled. The text is empty if no code is."""
    current = {id(reference) for reference in _references()}
    codes = [reference() for reference in before if id(reference) in current]
    names = sorted({f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" for code in codes if code is not None})
    return f"compiled before the patch went on: {', '.join(names)}; torch._dynamo.reset() drops that" if names else ""


def _references() -> list[Any]:
    frames = sys.modules.get("torch._dynamo.convert_frame")
    # This attribute is private, and the same in torch 2.6, 2.9 and 2.13.
    return list(getattr(getattr(frames, "output_codes", None), "seen", ()))


def _of_a_model(code: CodeType) -> bool:
    folders = [folder for folder in map(folder_of, (*TRL_AND_BELOW, "peft")) if folder]
    path = os.path.realpath(code.co_filename)
    inside = next((path[len(folder) :] for folder in folders if path.startswith(folder + os.sep)), "trainer")
    return "trainer" not in inside
