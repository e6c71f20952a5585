"""``verify``: the self-tests in a fresh process, red, green, red."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from .. import __version__, catalogue, gates
from ..errors import UnknownPatchError
from ..model import State
from ..packs import VARIABLE, named
from ..report import show
from . import Exit, unsupported, with_packs

PACKAGE = __package__.partition(".")[0]


@click.command("verify")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--json", "as_data", is_flag=True, help="The verdicts and the numbers as JSON.")
@with_packs
def command(ids: tuple[str, ...], as_data: bool, packs: str | None) -> int:
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
    if unsupported(trl):
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


def _verified(ids: Sequence[str], packs: Sequence[str]) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "verdicts.json")
        command = [sys.executable, "-m", f"{PACKAGE}.verify", str(out), *ids]
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
