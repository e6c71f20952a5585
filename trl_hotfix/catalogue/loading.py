"""Load the ``patches.yaml`` of this package and those of packs, as ``tuple[Patch, ...]``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from ..errors import CatalogueError, Mistake, PackError
from ..model import Patch
from . import packs
from .data_files import manifest
from .parsing import parse


@functools.cache
def load() -> tuple[Patch, ...]:
    """Return the patches of the ``patches.yaml`` that belongs to this package. Raises ``CatalogueError``."""
    return _read(manifest())


def known(names: Iterable[str]) -> tuple[Patch, ...]:
    """Return the package's own patches and those of the named packs. Raises ``CatalogueError``, ``PackError``."""
    return load() + tuple(patch for name in names for patch in of_pack(name))


@functools.cache
def of_pack(name: str) -> tuple[Patch, ...]:
    """Return the patches of a pack, with the ids ``name/id``. The modules of the patches are imported."""
    pack = packs.find(name)
    path = pack.file("patches.yaml")
    if path is None:
        raise PackError(f"the pack {name!r} ({pack.release}) has no {pack.package}/patches.yaml")
    patches = _read(path, name)
    return tuple(replace(patch, id=f"{name}/{patch.id}") for patch in patches)


def _read(path: Path, pack: str = "") -> tuple[Patch, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(str(path), [Mistake(1, f"cannot be read: {error}")]) from error
    return parse(text, str(path), pack)
