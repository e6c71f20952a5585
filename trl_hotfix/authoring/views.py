"""Views of tokenizers, which wrappers give TRL in their place."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def pickled_as_made(make: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Return what ``__reduce_ex__`` of a view returns which ``make(*arguments)`` makes.

    So it is pickled, for worker processes and for the cache key of ``datasets``. ``make`` is given one argument more, a
    digest of its file. It is unused except that it changes that key when the file changes.
    """
    return make, (*arguments, hashlib.sha256(Path(inspect.getfile(make)).read_bytes()).hexdigest())
