"""The libraries from which the code of a trainer may come: TRL and its dependencies."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import FunctionType

TRL_AND_BELOW = ("trl", "transformers", "torch", "accelerate", "huggingface_hub")
"""The methods of a trainer and their decorators come from these packages.

The decorators are ``torch.no_grad``, TRL's ``profiling_decorator`` and, on constructors up to 0.12, huggingface_hub's
``_deprecate_arguments``.
"""


_DECORATORS = tuple(map(os.path.realpath, (functools.__file__, contextlib.__file__)))


def is_of_trl(function: FunctionType) -> bool:
    """Return whether the code of ``function`` is TRL's, or that of a decorator that TRL takes from these libraries."""
    path = _real(function.__code__.co_filename)
    if path in _DECORATORS:
        return True
    return any(path.startswith(folder + os.sep) for folder in map(folder_of, TRL_AND_BELOW) if folder)


def folder_of(package: str) -> str | None:
    """Return the folder of a package, or None if it is not imported or has no file."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return os.path.dirname(_real(file)) if file else None


# Following the links of a path takes a look at each of its folders.
_real = functools.cache(os.path.realpath)
