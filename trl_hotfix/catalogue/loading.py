"""Load the catalogue of this package and those of packs, as ``tuple[Patch, ...]``, and the bugs without a repair.

A checkout and a pack have YAML. A wheel has the same entries as JSON, checked when it was built (``shipped``): reading
that takes a millisecond, and needs no parser of YAML.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from ..errors import CatalogueError, Mistake, PackError
from ..model import KnownBug, Patch
from . import packs
from .data_files import decoded, known_bugs_file, manifest
from .names import by_name


@functools.cache
def load() -> tuple[Patch, ...]:
    """Return the patches of this package. Raises ``CatalogueError``, or ``DamagedError`` in an installed package.

    It imports no module of a patch: each comes with the module of TRL that its patch concerns.
    """
    path = manifest()
    if path.suffix == ".json":
        patches: tuple[Patch, ...] = decoded(path, tuple[Patch, ...])
        return patches
    return _parsed(path)


def known(names: Iterable[str]) -> tuple[Patch, ...]:
    """Return the package's own patches and those of the named packs. Raises ``CatalogueError``, ``PackError``."""
    return load() + tuple(patch for name in names for patch in of_pack(name))


@functools.cache
def without_repair() -> tuple[KnownBug, ...]:
    """Return the known bugs of TRL that have no patch. Raises ``CatalogueError`` or ``DamagedError``.

    They are in a file of their own, which ``apply()`` does not read: a mistake in it keeps no patch from going on, and
    a process that trains does not wait for it.
    """
    path = known_bugs_file()
    if path.suffix == ".json":
        bugs: tuple[KnownBug, ...] = decoded(path, tuple[KnownBug, ...])
        return bugs
    from .parsing import parse_known

    return parse_known(text_of(path), str(path), by_name(load()))


@functools.cache
def of_pack(name: str) -> tuple[Patch, ...]:
    """Return the patches of a pack, with the ids ``name/id``. The modules of the patches are imported and checked."""
    pack = packs.find(name)
    path = pack.file("patches.yaml")
    if path is None:
        raise PackError(f"the pack {name!r} ({pack.release}) has no {pack.package}/patches.yaml")
    return tuple(
        replace(patch, id=f"{name}/{patch.id}", formerly=tuple(f"{name}/{former}" for former in patch.formerly))
        for patch in _parsed(path, name)
    )


def _parsed(path: Path, pack: str = "") -> tuple[Patch, ...]:
    from .parsing import parse  # An installed package needs it for packs alone.

    return parse(text_of(path), str(path), pack, modules=bool(pack))


def text_of(path: Path) -> str:
    """Return the text of a YAML file. Raises ``CatalogueError`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(str(path), [Mistake(1, f"cannot be read: {error}")]) from error
