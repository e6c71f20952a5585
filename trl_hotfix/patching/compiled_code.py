"""Code that Dynamo has compiled before a patch went on: it may hold the method as it was, inlined."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

from .libraries import TRL_AND_BELOW, folder_of

Compiled = tuple[Any, ...]
"""Weak references to code that Dynamo has compiled. After ``torch._dynamo.reset()`` it holds others."""


def compiled_now(*, traced: bool) -> Compiled:
    """Return the compiled code that may hold a target's function as it is now, inlined: it goes on calling that.

    Which functions Dynamo has inlined is not on record, so for a ``traced`` target it is all. Any other target is
    called by a trainer or the user's own code: what these libraries have compiled of their models does not count.
    """
    return tuple(each for each in _references() if (code := each()) and (traced or not _of_a_model(code)))


def still_compiled(before: Compiled) -> str:
    """Return in words what of the code compiled ``before`` is still there."""
    now = {id(each) for each in _references()}
    left = [each() for each in before if id(each) in now]
    where = sorted({f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" for code in left if code is not None})
    return f"compiled before the patch went on: {', '.join(where)}; torch._dynamo.reset() drops that" if where else ""


def _references() -> list[Any]:
    frames = sys.modules.get("torch._dynamo.convert_frame")
    # Private, and the same in torch 2.6, 2.9 and 2.13.
    return list(getattr(getattr(frames, "output_codes", None), "seen", ()))


def _of_a_model(code: CodeType) -> bool:
    folders = [folder for folder in map(folder_of, (*TRL_AND_BELOW, "peft")) if folder]
    path = os.path.realpath(code.co_filename)
    inside = next((path[len(folder) :] for folder in folders if path.startswith(folder + os.sep)), "trainer")
    return "trainer" not in inside
