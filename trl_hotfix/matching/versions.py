"""Which versions are installed, and whether a version is in a range."""

from __future__ import annotations

import email
import functools
from collections.abc import Callable
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = SpecifierSet(">=0.9.6")
"""The TRL releases that the catalogue speaks of; an older one is reported as not supported."""


VersionOf = Callable[[str], "str | None"]


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, from its metadata; None if it is not installed."""
    try:
        its = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    # `its.version` would read the whole description each time, which is TRL's README.
    text = its.read_text("METADATA") or its.read_text("PKG-INFO") or ""
    version: str | None = email.message_from_string(text.partition("\n\n")[0])["Version"]
    return version or its.version


def installed_but(trl: str) -> VersionOf:
    """What is installed, if it were beside this TRL."""
    return lambda distribution: trl if distribution == "trl" else installed(distribution)


@functools.cache
def in_range(version: str, specifiers: str) -> bool:
    """``version`` is in the PEP 440 range; a pre-release such as 1.0.0rc1 counts as what it is."""
    return SpecifierSet(specifiers).contains(Version(version), prereleases=True)


def is_unreleased(trl: str) -> bool:
    """A development version or a fork: 1.10.0.dev0 lies in neither <1.10 nor >=1.10, so that its bodies must decide."""
    version = Version(trl)
    return version.is_devrelease or version.local is not None
