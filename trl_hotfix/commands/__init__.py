"""One module a command, of its name: ``command`` is what click runs, ``Answer`` the shape of what ``--json`` prints."""

from __future__ import annotations

from enum import IntEnum

import click

from .. import gates

NAMES = ("list", "scan", "explain", "verify", "fingerprint", "doctor", "run", "freeze", "new")
"""In the order of the help."""

with_packs = click.option("--packs", metavar="NAME,...", help="Packs of third parties, besides our own patches.")


class Exit(IntEnum):
    """The exit codes of every command."""

    FINE = 0
    DEGRADED = 1
    USAGE = 2
    CATALOGUE = 3
    NO_TRL = 4


def unsupported(trl: str | None) -> bool:
    """Is no TRL installed, or one that is too old?"""
    return trl is None or not gates.SUPPORTED.contains(trl, prereleases=True)
