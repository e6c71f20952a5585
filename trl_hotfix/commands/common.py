"""What commands share: exit codes, options, and the names of releases and trainers that a user gives."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import click
from packaging.version import InvalidVersion, Version

from ..errors import suggestion
from ..matching import versions
from ..matching.fingerprints import bodies
from ..model import Patch

with_packs = click.option("--packs", metavar="NAME,...", help="Packs of third parties, besides our own patches.")


class Exit(IntEnum):
    """The exit codes of every command."""

    FINE = 0
    DEGRADED = 1
    USAGE = 2
    CATALOGUE = 3
    NO_TRL = 4


def release(wanted: str) -> str:
    """A release of TRL, as it is spelt; also one that is newer or older than all that were looked at, and a fork."""
    try:
        version = Version(wanted)
    except InvalidVersion:
        raise click.UsageError(f"--trl: {wanted!r} is not a version such as 0.12.2") from None
    known = bodies().releases
    if versions.is_unreleased(wanted) or wanted in known or version > Version(known[-1]) or version < Version(known[0]):
        return wanted
    spelt = [each for each in known if Version(each) == version]
    if spelt:
        return spelt[0]
    raise click.UsageError(f"--trl: there is no TRL {wanted}{suggestion(wanted, known)}")


def trainer(wanted: str, patches: Iterable[Patch]) -> str:
    """``dpo``, ``DPO`` or ``DPOTrainer`` as the patches have it: ``DPO``."""
    known = {each for patch in patches for hit in patch.hits for each in hit.trainers} - {"*"}
    name = wanted.lower().removesuffix("trainer")
    for each in known:
        if each.lower() == name:
            return each
    there = suggestion(name.upper(), known) or f"; of {', '.join(sorted(known))}"
    raise click.UsageError(f"--trainer: no trainer {wanted!r} is known{there}")


def unsupported(trl: str | None) -> bool:
    """Is no TRL installed, or one that is too old?"""
    return trl is None or not versions.SUPPORTED.contains(trl, prereleases=True)
