"""Whether the ranges of the catalogue and the metadata of TRL speak of the code that is, or would be, imported.

The gates believe the version in TRL's metadata. Another ``trl`` may come first on ``sys.path``, or the metadata of an
editable checkout may be older than its code. We do not import TRL here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..errors import plain
from ..model import Patch
from .versions import installed

_VERSION = re.compile(r"""^__version__(?:\s*:\s*\w+)?\s*=\s*["']([^"'\n]{1,80})["']""", re.MULTILINE)


def problems(patches: Iterable[Patch]) -> list[str]:
    """Return why no patch can be chosen rightly for the TRL that is installed, a line for each reason."""
    trl = installed("trl")
    if trl is None:
        return []
    return [problem for problem in (_too_old(trl, patches), mismatch()) if problem is not None]


def _too_old(trl: str, patches: Iterable[Patch]) -> str | None:
    oldest = oldest_release(patches)
    if oldest is None or Version(Version(trl).base_version) >= oldest:
        return None
    return f"TRL {plain(trl)} is older than all releases that the catalogue covers, {oldest} and later: no patch is on"


def oldest_release(patches: Iterable[Patch]) -> Version | None:
    """Return the lower bound of the ranges of all patches, or None if one of them has no lower bound."""
    bounds = []
    for patch in patches:
        lower = [
            Version(specifier.version.removesuffix(".*"))
            for specifier in SpecifierSet(patch.trl)
            if specifier.operator in (">=", ">", "==", "~=")
        ]
        if not lower:
            return None
        bounds.append(max(lower))
    return min(bounds, default=None)


def mismatch() -> str | None:
    """Return what differs if the ``trl`` that is, or would be, imported is not the one that its metadata describe.

    Without metadata or without a package there is nothing to compare. Code in another folder than the metadata is
    accepted if it says that it has the same version, or if it is the checkout of an editable install.
    """
    try:
        distribution = metadata.distribution("trl")
        version = distribution.version
    except (metadata.PackageNotFoundError, KeyError):
        return None
    spec = imported_spec()
    folder = folder_of(spec)
    if spec is None or folder is None:
        return None
    described = str(distribution.locate_file("trl"))
    checkout = editable_checkout(distribution)
    in_checkout = checkout is not None and _is_in(folder, checkout)
    if _same(folder, described) and not in_checkout:
        return None
    says = _version_in(spec, folder)
    if (says is None and in_checkout) or (says is not None and _equal(says, version)):
        return None
    of_version = f" of version {plain(says)}" if says is not None else ""
    where = f"{checkout}, when it was installed" if in_checkout else described
    return f"`import trl` takes {plain(folder)}{of_version}, but the version {plain(version)} comes from {plain(where)}"


def imported_spec() -> ModuleSpec | None:
    """Return the spec of the ``trl`` that is imported, or else of the one that an import would take."""
    module = sys.modules.get("trl")
    if module is not None:
        return getattr(module, "__spec__", None)
    # The finders of other code may raise anything, and then an import of TRL would raise it too.
    try:
        return find_spec("trl")
    except Exception:  # noqa: BLE001
        return None


def folder_of(spec: ModuleSpec | None) -> str | None:
    """Return the folder of a package, or None for a namespace package and for one that has no file."""
    return os.path.dirname(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def editable_checkout(distribution: metadata.Distribution) -> str | None:
    """Return the folder of an editable install. It is empty if the metadata do not name it, None for other installs."""
    try:
        direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not isinstance(direct_url, dict) or not (direct_url.get("dir_info") or {}).get("editable"):
        return None
    return unquote(urlsplit(str(direct_url.get("url", ""))).path)


def _same(one: str, other: str) -> bool:
    with suppress(OSError):
        return Path(one).samefile(other)
    return os.path.normpath(one) == os.path.normpath(other)


def _is_in(folder: str, checkout: str) -> bool:
    root = os.path.realpath(checkout).rstrip(os.sep) + os.sep
    return os.path.realpath(folder).startswith(root)


def _version_in(spec: ModuleSpec, folder: str) -> str | None:
    """Return the version that the code itself names: in ``__init__.py``, in ``VERSION``, or in metadata beside it."""
    parent = os.path.dirname(folder)
    literal = _VERSION.search(_text(spec, str(spec.origin)))
    if literal is not None:
        return literal[1]
    for path in (os.path.join(folder, "VERSION"), os.path.join(parent, "VERSION")):
        text = _text(spec, path).strip()
        with suppress(InvalidVersion):
            return str(Version(text))
    beside = next(iter(metadata.distributions(name="trl", path=[parent])), None)
    return beside.version if beside is not None else None


def _text(spec: ModuleSpec, path: str) -> str:
    """Return a file of the package, also of one in a zip file, or an empty text."""
    read = getattr(spec.loader, "get_data", None)
    if read is None:
        return ""
    with suppress(OSError, UnicodeDecodeError):
        text: str = read(path).decode("utf-8")
        return text
    return ""


def _equal(says: str, version: str) -> bool:
    """Return whether two versions mean the same code. A fork may have a local version in its metadata only."""
    try:
        return Version(says).public == Version(version).public
    except InvalidVersion:
        return says == version
