"""``python -m trl_hotfix ...`` and ``trl-hotfix ...``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from . import __version__, catalogue, gates, startup
from .engine import apply
from .errors import CatalogueError, DamagedError, PackError, SettingError, UnknownPatchError
from .fingerprint import bodies_for
from .model import Patch, State, Target
from .packs import VARIABLE, named
from .report import as_json, show, table
from .wheels import NotATrlError, Release


class Exit(IntEnum):
    """The exit codes of every command."""

    FINE = 0
    DEGRADED = 1
    USAGE = 2
    CATALOGUE = 3
    NO_TRL = 4


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trl_hotfix")
def commands() -> None:
    """Repairs silent training bugs in the TRL that is installed.

    \b
    Exit codes: 0 fine, 1 a patch that should be on cannot be, 2 usage, 3 broken patches.yaml (or another data file),
    4 no TRL or none that is supported.

    --list and --verify are other spellings of list and verify.
    """


_with_packs = click.option("--packs", metavar="NAME,...", help="Packs of third parties, besides our own patches.")


@commands.command("list")
@click.option("--json", "as_data", is_flag=True, help="The report as JSON.")
@_with_packs
def list_patches(as_data: bool, packs: str | None) -> int:
    """Every patch: what it repairs, and whether it applies to the TRL installed here."""
    report = apply(dry_run=True, packs=packs)
    if as_data:
        click.echo(as_json(report))
    else:
        show(table(report))
        click.echo(f"trl_hotfix {report.trl_hotfix}, Python {report.python}, digest {report.digest}")
        click.echo(_start_hook())
    if _unsupported(report.trl):
        return Exit.NO_TRL
    return Exit.FINE if report.ok else Exit.DEGRADED


@commands.command("verify")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--json", "as_data", is_flag=True, help="The verdicts and the numbers as JSON.")
@_with_packs
def verify(ids: tuple[str, ...], as_data: bool, packs: str | None) -> int:
    """Run the self-tests on the TRL installed here, in a fresh process: red, patched green, reverted red.

    Without IDs: those of every patch that applies here.
    """
    names = named(packs, os.environ)
    patches = catalogue.known(names)
    known = [patch.id for patch in patches]
    unknown = [each for each in ids if each not in known]
    if unknown:
        raise UnknownPatchError(unknown, known, "verify")
    trl = gates.installed("trl")
    if _unsupported(trl):
        click.echo(f"TRL is {trl or 'not installed'}; {gates.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    chosen = ids or tuple(patch.id for patch in patches if gates.fits(patch).state is State.PENDING)
    cells = _verified(chosen, names) if chosen else []
    if as_data:
        click.echo(json.dumps({"trl_hotfix": __version__, "trl": trl, "cells": cells}, indent=2))
    elif not cells:
        click.echo(f"no patch applies to TRL {trl}")
    else:
        show(_verdicts(cells))
    return Exit.FINE if all(cell["verdict"] in ("proven", "absent") for cell in cells) else Exit.DEGRADED


@commands.command("fingerprint")
@click.option(
    "--wheel", "path", required=True, type=click.Path(path_type=Path), help="A TRL wheel, or a folder with one."
)
@click.option("--json", "as_data", is_flag=True, help="The bodies as JSON.")
@_with_packs
def fingerprint(path: Path, as_data: bool, packs: str | None) -> int:
    """Of a TRL release that is not installed: which patches match its bodies, which bodies changed, what is gone.

    The wheel is read, not imported.
    """
    try:
        release = Release(path)
    except NotATrlError as error:
        raise click.ClickException(str(error)) from None
    patches = catalogue.known(named(packs, os.environ))
    found = [_compared(release, patch, target) for patch in patches for target in patch.targets]
    if as_data:
        click.echo(json.dumps({"trl_hotfix": __version__, "trl": release.version, "targets": found}, indent=2))
    else:
        view = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"TRL {release.version}", title_justify="left")
        for column in ("patch", "target", "in range", "body", "says", "same as"):
            view.add_column(column, overflow="fold")
        for each in found:
            view.add_row(
                *(Text(_word(each[key])) for key in ("patch", "target", "in_range", "body", "says", "same_as"))
            )
        show(view)
    unsure = any(each["in_range"] and each["says"] in ("unknown body", "gone") for each in found)
    return Exit.DEGRADED if unsure else Exit.FINE


def _compared(release: Release, patch: Patch, target: Target) -> dict[str, Any]:
    """One target in ``release``, against the bodies on record."""
    body = release.body(target.module, target.attribute)
    known = bodies_for(patch.id)
    what = known.what(patch.id, target.name, body)
    says = {"buggy": "matches", "fixed": "fixed", "absent": "no bug"}.get(what or "", "unknown body")
    same = known.releases_with(target.name, body)
    return {
        "patch": patch.id,
        "target": target.name,
        "in_range": gates.in_range(release.version, patch.range_of(target)),
        "body": body,
        "says": "gone" if body is None else says,
        "same_as": same[-1] if same else None,
    }


def _word(value: Any) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value) or str(value)


def _verified(ids: Sequence[str], packs: Sequence[str]) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "verdicts.json")
        command = [sys.executable, "-m", f"{__package__}.verify", str(out), *ids]
        environment[VARIABLE] = ",".join(packs)
        # What TRL prints while it is imported goes to standard error: standard output is ours, and may be JSON.
        done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if not out.is_file():
            raise click.ClickException(f"the process that runs the self-tests ended with exit code {done.returncode}")
        cells: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return cells


def _verdicts(cells: list[dict[str, Any]]) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("patch", "verdict", "module", "run", "self-test says", "numbers"):
        view.add_column(column, overflow="fold")
    for cell in cells:
        colour = "green" if cell["verdict"] in ("proven", "absent") else "bold red"
        head = [Text(cell["patch"]), Text(" ".join(filter(None, (cell["verdict"], cell["why"]))), style=colour)]
        rows = [(leaf, run, dict(seen)) for leaf, runs in cell["leaves"].items() for run, seen in runs.items()]
        for leaf, run, seen in rows:
            said = seen.pop("verdict")
            numbers = " ".join(f"{key}={_short(value)}" for key, value in seen.items())
            view.add_row(*head, *(Text(each) for each in (leaf, run, said, numbers)))
            head = [Text(""), Text("")]
        if not rows:
            view.add_row(*head)
    return view


def _short(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _start_hook() -> str:
    problem = startup.hook_problem()
    if problem is not None:
        return f"TRL_HOTFIX=1 does nothing here: {problem}. trl_hotfix.apply() in the script works."
    value = os.environ.get("TRL_HOTFIX", "")
    now = {"on": "on", startup.STRICT: "on, strict", "off": "off"}.get(startup.switch(value) or "off", "off")
    return f"TRL_HOTFIX=1 works here; it is {now} in this shell."


def _unsupported(trl: str | None) -> bool:
    return trl is None or not gates.SUPPORTED.contains(trl, prereleases=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exits with one of ``Exit``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for spelling in ("--list", "--verify"):
        if spelling in words:
            words.remove(spelling)
            words.insert(0, spelling.lstrip("-"))
    code: int
    try:
        code = commands.main(words, prog_name="trl-hotfix", standalone_mode=False) or Exit.FINE
    except click.ClickException as error:
        error.show()
        code = Exit.USAGE
    except click.exceptions.Abort:
        code = Exit.USAGE
    except (PackError, SettingError, UnknownPatchError) as error:
        click.echo(f"trl-hotfix: {error}", err=True)
        code = Exit.USAGE
    except (CatalogueError, DamagedError) as error:
        click.echo(f"trl-hotfix: {error}", err=True)
        code = Exit.CATALOGUE
    sys.exit(code)
