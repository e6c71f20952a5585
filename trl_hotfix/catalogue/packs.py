"""Packs: patches that another distribution brings, in a package of its own, used only where the user names them.

A distribution declares ``[project.entry-points."trl_hotfix.packs"] name = "its_package"``. Of that package
``patches.yaml``, ``patches/<id>.py`` and ``fingerprints.json`` are taken and nothing else, and only files that the
distribution has installed: what it names cannot be somebody else's package. Its patches are ``name/id`` everywhere.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..errors import PackError, plain, suggestion

GROUP = "trl_hotfix.packs"
VARIABLE = "TRL_HOTFIX_PACKS"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
PACKAGE = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack that is installed: its package, and the files of its distribution, by their path."""

    name: str
    package: str
    distribution: str
    version: str
    files: Mapping[str, Path]

    @property
    def release(self) -> str:
        return f"{self.distribution}=={self.version}"

    def file(self, *steps: str) -> Path | None:
        """A file of the package, if the distribution has installed it."""
        return self.files.get("/".join((self.package, *steps)))


def named(argument: Iterable[str] | str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names of packs that the user gave: as the argument, or else in ``TRL_HOTFIX_PACKS``, separated by commas."""
    given = environment.get(VARIABLE, "") if argument is None else argument
    names = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(name for name in map(str.strip, names) if name))


def pack_of(patch_id: str) -> str:
    """The name of the pack that a patch is of; empty for one of ours."""
    return patch_id.rpartition("/")[0]


@functools.cache
def find(name: str) -> Pack:
    """The pack of this name. Nothing of it is imported. Raises ``PackError``."""
    every = {each.name: each for each in metadata.entry_points(group=GROUP)}
    offers = [each for each in metadata.entry_points(group=GROUP) if each.name == name and NAME.match(name)]
    if not offers:
        there = ", ".join(map(plain, sorted(every))) or "none"
        raise PackError(f"no pack {name!r} is installed (there is: {there}){suggestion(name, every)}")
    by = sorted({each.dist.name if each.dist is not None else "?" for each in offers})
    if len(offers) > 1:
        raise PackError(f"the pack {name!r} is offered by more than one distribution: {', '.join(map(plain, by))}")
    (offer,) = offers
    if offer.dist is None or not PACKAGE.match(offer.value):
        raise PackError(f"the pack {name!r} of {plain(by[0])} names {offer.value!r}, expected a package and no more")
    files = {str(each): Path(str(each.locate())) for each in offer.dist.files or ()}
    pack = Pack(name, offer.value, offer.dist.name, offer.dist.version, files)
    found, its = _origin(pack.package), pack.file("__init__.py")
    if its is None or found is None or not found.samefile(its):
        raise PackError(
            f"the pack {name!r} names {pack.package!r}, which {plain(by[0])} has not installed: it is {found}"
        )
    return pack


def _origin(package: str) -> Path | None:
    """The file that importing a top-level package would run; it is looked up and not imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # in sys.modules without a spec
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and Path(spec.origin).is_file() else None
