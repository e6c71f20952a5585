"""Find the module that holds the wrappers and the self-test of a patch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import signal_handlers
from ..errors import DamagedError
from ..model import Options, Patch
from . import packs

PATCHES = Path(__file__).parents[1] / "patches"

PATCH_MODULES: set[str] = set()
"""Names of the modules that wrappers and self-tests have been taken from."""


def module_of(patch_id: str) -> str:
    """Return the name of the module that holds the wrappers and the self-test of a patch.

    It is made from the id. One of ours is in the folder of its family, and one of a pack in none.
    """
    pack, _, name = patch_id.rpartition("/")
    package = packs.find(pack).package if pack else __package__.partition(".")[0]
    family = "" if pack else family_of(name)
    return ".".join(filter(None, (package, "patches", family, name.replace("-", "_"))))


def family_of(patch_id: str) -> str:
    """Return the family of a patch of ours: the folder of ``patches/`` that has its module, or "" if none has."""
    file = f"{patch_id.replace('-', '_')}.py"
    if file not in _families():
        _families.cache_clear()  # It may have been written since.
    return _families().get(file, "")


def families() -> list[str]:
    """Return the names of the families."""
    return sorted(path.parent.name for path in PATCHES.glob("*/__init__.py"))


@functools.cache
def _families() -> dict[str, str]:
    return {file.name: file.parent.name for file in PATCHES.glob("*/*.py") if file.name != "__init__.py"}


def is_from_outside(error: BaseException) -> bool:
    """Return whether a full memory or a signal handler, and not the module itself, has ended its import."""
    return isinstance(error, MemoryError) or signal_handlers.has_raised(error)


def function_of(patch: Patch, name: str, options: Options) -> Callable[..., Any]:
    """Return a wrapper or the self-test of ``patch`` by its name in the catalogue, bound to the user's options.

    It imports the module now, and not with the catalogue. Raises ``DamagedError`` if that fails, or if the
    module lacks the function.
    """
    module_name = module_of(patch.id)
    try:
        module = import_module(module_name)
        function: Callable[..., Any] = getattr(module, name)
    # The top level of a module may raise anything, and SystemExit would end the user's import of TRL.
    except (Exception, SystemExit) as error:
        if is_from_outside(error):
            raise
        pack = packs.pack_of(patch.id)
        raise DamagedError(module_name, error, packs.find(pack).release if pack else "trl_hotfix") from error
    PATCH_MODULES.add(module_name)
    return functools.partial(function, options=patch.chosen(options)) if patch.options else function
