"""Packs: patches from another distribution, in a package of its own, used only if the user names the pack.

A distribution declares ``[project.entry-points."trl_hotfix.packs"] name = "its_package"``. Only ``patches.yaml``,
``patches/<id>.py`` and ``fingerprints.json`` of that package are used, and only if that distribution has installed
them, so that a pack cannot name the package of another distribution. The ids of its patches are ``name/id``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..errors import PackError, plain, quoted, suggestion

GROUP = "trl_hotfix.packs"
VARIABLE = "TRL_HOTFIX_PACKS"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
PACKAGE = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pack:
    """An installed pack: its package, and the files of its distribution, by path."""

    name: str
    package: str
    distribution: str
    version: str
    files: Mapping[str, Path]

    @property
    def release(self) -> str:
        return f"{self.distribution}=={self.version}"

    def file(self, *steps: str) -> Path | None:
        """Return a file of the package, or None if the distribution has not installed it."""
        return self.files.get("/".join((self.package, *steps)))


def named(argument: Iterable[str] | str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the packs that the user named in the argument, or else in ``TRL_HOTFIX_PACKS``, separated by commas."""
    value = environment.get(VARIABLE, "") if argument is None else argument
    names = value.split(",") if isinstance(value, str) else value
    return tuple(dict.fromkeys(name for name in map(str.strip, names) if name))


def pack_of(patch_id: str) -> str:
    """Return the name of the pack that a patch belongs to. It is empty for a patch of this package."""
    return patch_id.rpartition("/")[0]


@functools.cache
def find(name: str) -> Pack:
    """Return the pack of this name. We import nothing of it. Raises ``PackError``."""
    installed = {entry_point.name: entry_point for entry_point in metadata.entry_points(group=GROUP)}
    offers = [
        entry_point
        for entry_point in metadata.entry_points(group=GROUP)
        if entry_point.name == name and NAME.match(name)
    ]
    if not offers:
        names = ", ".join(map(plain, sorted(installed))) or "none"
        raise PackError(f"no pack {quoted(name)} is installed (there is: {names}){suggestion(name, installed)}")
    distributions = sorted({offer.dist.name if offer.dist is not None else "?" for offer in offers})
    if len(offers) > 1:
        names = ", ".join(map(plain, distributions))
        raise PackError(f"the pack {name!r} is offered by more than one distribution: {names}")
    (offer,) = offers
    distribution = plain(distributions[0])
    if offer.dist is None or not PACKAGE.match(offer.value):
        raise PackError(f"the pack {name!r} of {distribution} names {offer.value!r}, expected a package and no more")
    files = {str(path): Path(str(path.locate())) for path in offer.dist.files or ()}
    pack = Pack(name, offer.value, offer.dist.name, offer.dist.version, files)
    imported_file, installed_file = _origin(pack.package), pack.file("__init__.py")
    if installed_file is None or imported_file is None or not imported_file.samefile(installed_file):
        raise PackError(
            f"the pack {name!r} names {pack.package!r}, which {distribution} has not installed: it is {imported_file}"
            f"{_in_working_folder(imported_file)}"
        )
    return pack


def _in_working_folder(file: Path | None) -> str:
    """Return what to do where ``python -m trl_hotfix`` has put the project of the pack before the installed package."""
    if file is None or file.parents[1] != Path.cwd():
        return ""
    return "; run `trl-hotfix` instead of `python -m trl_hotfix`, which looks into the working folder first"


def _origin(package: str) -> Path | None:
    """Return the file that importing a top-level package would run. The package is looked up and not imported."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # The package is in sys.modules without a spec.
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and Path(spec.origin).is_file() else None
