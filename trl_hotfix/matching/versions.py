"""Look up installed versions, and test whether a version is in a range."""

from __future__ import annotations

import email
import functools
from collections.abc import Callable, Mapping
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

SUPPORTED = SpecifierSet(">=0.9.6")
"""The TRL releases that the catalogue covers. We report an older one as not supported."""


VersionOf = Callable[[str], "str | None"]


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution from its metadata, or None if it is not installed."""
    try:
        info = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    # `info.version` would read the whole description each time, which is TRL's README.
    text = info.read_text("METADATA") or info.read_text("PKG-INFO") or ""
    return _version_in(text.partition("\n\n")[0]) or info.version


@functools.cache
def _version_in(header: str) -> str | None:
    version: str | None = email.message_from_string(header)["Version"]
    return version


def installed_but(trl: str | None = None, told: Mapping[str, str] | None = None) -> VersionOf:
    """Return a look-up of installed versions in which TRL is ``trl``, and others are ``told`` by canonical name."""
    instead = {**(told or {}), **({"trl": trl} if trl is not None else {})}
    return lambda distribution: instead.get(canonicalize_name(distribution)) or installed(distribution)


def is_version(text: str) -> bool:
    """Return whether the text is a version as PEP 440 has it."""
    try:
        Version(text)
    # A number of thousands of digits is a ValueError, and no InvalidVersion.
    except ValueError:
        return False
    return True


@functools.cache
def in_range(version: str, specifiers: str) -> bool:
    """Return whether ``version`` is in the PEP 440 range. A pre-release such as 1.0.0rc1 may be in it."""
    return SpecifierSet(specifiers).contains(Version(version), prereleases=True)


def is_unreleased(trl: str) -> bool:
    """Return whether ``trl`` is a development version or a fork.

    1.10.0.dev0 is in neither <1.10 nor >=1.10, so the bodies of its methods decide whether a patch applies.
    """
    version = Version(trl)
    return version.is_devrelease or version.local is not None
