"""Keep Python's garbage collector from running while patches go on.

It runs once in so many new objects of any code. Now and then it looks through all that torch, transformers and
TRL have made, which takes 0.2 seconds. Our work makes enough objects for one more such search, which finds next to
nothing, as most of them stay. So the collector waits while our own modules are imported, and until the patches are on.
"""

from __future__ import annotations

import gc
from _thread import get_ident
from collections.abc import Iterator
from contextlib import contextmanager

_paused_by: int | None = None
"""The thread that has paused the collector."""


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector for the block, or for the calls of a function. One that is off already stays off."""
    global _paused_by
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _paused_by = get_ident()
    try:
        yield
    finally:
        _paused_by = None
        gc.enable()


def after_fork_in_child() -> None:
    """Let the collector run in a child if another thread, which the child does not have, has paused it."""
    global _paused_by
    if _paused_by not in (None, get_ident()):
        _paused_by = None
        gc.enable()
