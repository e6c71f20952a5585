"""Load the ``patches.yaml`` of this package and those of packs, as ``tuple[Patch, ...]``, and the ``known.yaml``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from ..errors import CatalogueError, Mistake, PackError
from ..model import KnownBug, Patch
from . import packs
from .data_files import known_bugs_file, manifest
from .parsing import parse, parse_known


@functools.cache
def load() -> tuple[Patch, ...]:
    """Return the patches of the ``patches.yaml`` that belongs to this package. Raises ``CatalogueError``."""
    return _read(manifest())


def known(names: Iterable[str]) -> tuple[Patch, ...]:
    """Return the package's own patches and those of the named packs. Raises ``CatalogueError``, ``PackError``."""
    return load() + tuple(patch for name in names for patch in of_pack(name))


@functools.cache
def without_repair() -> tuple[KnownBug, ...]:
    """Return the known bugs of TRL that have no patch. Raises ``CatalogueError``.

    They are in a file of their own, which ``apply()`` does not read: a mistake in it keeps no patch from going on, and
    a process that trains does not wait for it.
    """
    path = known_bugs_file()
    return parse_known(_text(path), str(path), {patch.id for patch in load()})


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
    return parse(_text(path), str(path), pack)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(str(path), [Mistake(1, f"cannot be read: {error}")]) from error
