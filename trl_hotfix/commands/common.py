"""The exit codes and options that commands share, and the parsing of releases and trainers that a user names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..catalogue import loading
from ..catalogue.packs import named, pack_of
from ..errors import quoted, shortened, suggestion
from ..matching import versions
from ..matching.fingerprints import bodies, unproven
from ..model import Bug, Reason, State
from ..reporting.lines import say
from ..reporting.report import PatchStatus, Report

with_packs = click.option("--packs", metavar="NAME,...", help="Packs of third parties, besides our own patches.")


with_versions = click.option(
    "--with",
    "versions_told",
    metavar="NAME==VERSION",
    multiple=True,
    help="The version of another distribution, such as transformers==4.50.3. Several times if needed.",
)


LONGEST_IN_JSON = 1_000_000
"""So many characters has a text in the JSON of a command."""


class Exit(IntEnum):
    """The exit codes of every command."""

    FINE = 0
    DEGRADED = 1
    USAGE = 2
    CATALOGUE = 3
    NO_TRL = 4


def search_path(folders: Iterable[str]) -> str:
    """Return ``PYTHONPATH`` for a process that starts in another folder and imports what this one can."""
    return os.pathsep.join(map(os.path.abspath, folders))


def known_bugs(packs: str | None) -> list[Bug]:
    """Return all known bugs: those of the patches, of the packs' patches, and those without a repair."""
    return [*loading.known(named(packs, os.environ)), *loading.without_repair()]


def release(text: str) -> str:
    """Return the release of TRL that ``text`` names, in its own spelling.

    Forks, and releases newer or older than all those on record, are accepted too.
    """
    try:
        version = Version(text)
    # A number of thousands of digits is a ValueError, and no InvalidVersion.
    except ValueError:
        raise click.UsageError(f"{quoted(text)} is not a version such as 0.12.2") from None
    known = bodies().releases
    if versions.is_unreleased(text) or text in known or version > Version(known[-1]) or version < Version(known[0]):
        return text
    equal = [name for name in known if Version(name) == version]
    if equal:
        return equal[0]
    raise click.UsageError(f"there is no TRL {text}{suggestion(text, known)}")


def warn_of_unproven(*releases: str | None) -> None:
    """Say on standard error that nobody has proved the patches on these TRLs."""
    for trl in releases:
        doubt = unproven(trl) if trl is not None else None
        if doubt is not None:
            say(f"{doubt}: the answer is a guess.", err=True)


def told_versions(texts: Iterable[str]) -> dict[str, str]:
    """Return the versions in ``transformers==4.50.3`` by canonical name; one ``=`` is enough."""
    told: dict[str, str] = {}
    for text in texts:
        name, _, version = text.replace("==", "=").partition("=")
        try:
            told[canonicalize_name(Requirement(name).name)] = str(Version(version))
        except ValueError:
            raise click.UsageError(f"--with: expected NAME==VERSION, found {quoted(text)}") from None
    if "trl" in told:
        raise click.UsageError(f"--with: give the release of TRL as --trl {told['trl']}")
    return told


def trainer(text: str, patches: Iterable[Bug]) -> str:
    """Return the name that patches use for ``dpo``, ``DPO`` or ``DPOTrainer``, which is ``DPO``."""
    known = {name for patch in patches for hit in patch.hits for name in hit.trainers} - {"*"}
    lower_case = text.lower().removesuffix("trainer")
    for name in known:
        if name.lower() == lower_case:
            return name
    hint = suggestion(lower_case.upper(), known) or f"; of {', '.join(sorted(known))}"
    raise click.UsageError(f"--trainer: no trainer {quoted(text)} is known{hint}")


def unsupported(trl: str | None) -> bool:
    """Return whether no TRL is installed, or one that is too old."""
    return trl is None or not versions.SUPPORTED.contains(trl, prereleases=True)


def named_and_off(report: Report) -> list[PatchStatus]:
    """Return the patches that the user asked for, by a freeze file or by naming their pack, and that cannot be on."""
    by_file = os.environ.get("TRL_HOTFIX_ONLY", "").strip().startswith("@")
    return [
        status
        for status in report
        if (by_file and status.state is not State.PENDING and status.reason is not Reason.NOT_SELECTED)
        or (pack_of(status.id) and status.degraded)
    ]


def say_json(answer: Mapping[str, Any]) -> None:
    """Print an answer as JSON. Its texts are whole, up to a million characters."""
    click.echo(json.dumps(_bounded(answer), indent=2))


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value, LONGEST_IN_JSON)
    if isinstance(value, Mapping):
        return {name: _bounded(part) for name, part in value.items()}
    return [_bounded(part) for part in value] if isinstance(value, (list, tuple)) else value
