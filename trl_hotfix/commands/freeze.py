"""``freeze`` writes the set of patches that would be on here to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypedDict

import click

from ..patching.api import apply
from .common import Exit, unsupported, with_packs


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
@click.option("--force", is_flag=True, help="Overwrite the file if it is there.")
@with_packs
def command(path: Path | None, force: bool, packs: str | None) -> int:
    """The patches that would be on here, with revisions and options, as JSON.

    TRL_HOTFIX_ONLY=@FILE then applies exactly these, or says why it cannot. TRL_HOTFIX_ONLY, _SKIP and _OPTIONS are
    followed.
    """
    report = apply(dry_run=True, packs=packs, observe=False)
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
