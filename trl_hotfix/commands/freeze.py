"""``freeze`` writes the set of patches that would be on, here or with another release of TRL, to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import click

from ..api import apply
from ..catalogue import loading
from ..catalogue.packs import named
from ..errors import NotATrlError
from ..matching import sources, versions
from ..matching.fingerprints import bodies
from ..reporting.report import Report
from ..selection.selection import Selection
from .common import Exit, release, told_versions, unsupported, with_packs, with_versions
from .freeze_elsewhere import left_out, needed, report_elsewhere


class Frozen(TypedDict):
    """One patch that is on."""

    id: str
    revision: int
    options: dict[str, str]


class _WithPacks(TypedDict, total=False):
    packs: dict[str, str]
    """The distribution and version of each pack of third parties. It is present only if a patch is of a pack."""


class Answer(_WithPacks):
    """The content of the file, which is printed if no file is named."""

    trl_hotfix: str
    trl: str
    digest: str
    patches: list[Frozen]


@click.command("freeze")
@click.option("-o", "--output", "path", type=click.Path(path_type=Path), help="A file instead of standard output.")
@click.option("--trl", metavar="VERSION", help="The patches that would be on with this release of TRL instead.")
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    help="The files of that release: a wheel, or a folder in which it is installed. A fork needs it.",
)
@with_versions
@click.option("--force", is_flag=True, help="Overwrite the file if it is there.")
@with_packs
def command(
    path: Path | None,
    trl: str | None,
    wheel: Path | None,
    versions_told: tuple[str, ...],
    force: bool,
    packs: str | None,
) -> int:
    """The patches that would be on here, with revisions and options, as JSON.

    TRL_HOTFIX_ONLY=@FILE then applies exactly these, or says why it cannot. freeze follows TRL_HOTFIX_ONLY, _SKIP and
    _OPTIONS.

    For another release (--trl, --wheel) the evidence on record decides, or the files that are given: a patch is in the
    file if it is proven on the code of that release. stderr names what it leaves out. Of other distributions it takes
    the installed versions, or those of --with.
    """
    told = told_versions(versions_told)
    if trl is None and wheel is None:
        if told:
            raise click.UsageError("--with: for another release, which --trl or --wheel names")
        report = apply(dry_run=True, packs=packs, observe=False)
    else:
        report = _elsewhere(trl, wheel, told, packs)
    if unsupported(report.trl):
        click.echo(f"TRL is {report.trl or 'not installed'}: there is nothing to freeze", err=True)
        return Exit.NO_TRL
    text = json.dumps(report.freeze(), indent=2) + "\n"
    if path is None:
        click.echo(text, nl=False)
        return Exit.FINE
    try:
        _write(path, text, force)
    except FileExistsError:
        raise click.ClickException(f"{path} is there already; --force overwrites it") from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from None
    return Exit.FINE


def _elsewhere(trl: str | None, wheel: Path | None, told: Mapping[str, str], packs: str | None) -> Report:
    """Return the report for another release, and say on stderr what it rests on and what it leaves out."""
    files = _files(wheel) if wheel is not None else None
    told_trl = release(trl) if trl is not None else None
    if files is not None and told_trl is not None and files.version != told_trl:
        raise click.UsageError(f"--wheel has TRL {files.version}, and --trl says {told_trl}")
    version = files.version if files is not None else told_trl or ""
    if files is None and version == versions.installed("trl"):
        files = sources.installed()
    if files is None and version not in bodies().releases and not unsupported(version):
        raise click.UsageError(f"TRL {version} is not a release on record: give its files, --wheel FILE")

    version_of = versions.installed_but(version, told)
    names = named(packs, os.environ)
    patches = loading.known(names)
    report = report_elsewhere(patches, Selection.of(None, None, os.environ, patches, None, names), version_of, files)
    for name in sorted(needed(report, version) - told.keys()):
        found = versions.installed(name) or "no"
        click.echo(
            f"{name}: {found} is installed here, and freeze takes it; --with {name}==VERSION names another", err=True
        )
    for line in left_out(report, version):
        click.echo(line, err=True)
    return report


def _files(wheel: Path) -> sources.Release:
    try:
        return sources.Release(wheel)
    except NotATrlError as error:
        raise click.UsageError(f"--wheel: {error}") from None


def _write(path: Path, text: str, force: bool) -> None:
    """Write the complete file or nothing. Until then a reader finds the earlier content. Raises ``OSError``."""
    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    if not force:
        # This reserves the name, so that another process that writes the file at this moment does not lose it.
        path.open("x").close()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        if not force:
            path.unlink()
        raise
