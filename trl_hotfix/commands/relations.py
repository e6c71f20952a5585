"""``relations`` asks TRL's trainers, or a user's own, whether two runs that must agree do agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import suggestion
from ..matching import versions
from ..relations.cells import ERROR, VIOLATED
from ..relations.relations import RELATIONS
from ..relations.trainers import RECIPES
from ..reporting.table import show
from ..settings import without_our_variables
from .common import Exit, search_path, unsupported
from .progress import progress
from .relations_screen import Answer, CellAnswer, view

PACKAGE = __package__.partition(".")[0]


@click.command("relations")
@click.option("--trainer", "trainers", multiple=True, metavar="NAME", help="SFT, or my_module:MyTrainer. Default: all.")
@click.option("--recipe", metavar="MODULE:FUNCTION", help="What makes your trainer, if its constructor is another.")
@click.option("--relation", "names", multiple=True, metavar="NAME", help="Such as accumulation. Default: all.")
@click.option("--setting", default="", metavar="TEXT", help="Only the claims whose setting has this text.")
@click.option("--off", is_flag=True, help="Ask TRL as it is, without the patches.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default="the cores")
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
def command(
    trainers: tuple[str, ...],
    recipe: str | None,
    names: tuple[str, ...],
    setting: str,
    off: bool,
    jobs: int,
    as_data: bool,
) -> int:
    """Train tiny models with the installed TRL, and compare runs that must agree.

    A step over eight rows is the same step in batches of two; a resumed run is the run that never stopped. Where two
    such runs differ, something is wrong, whether anybody has reported it or not.

    Exit codes: 0 each relation holds, or has a cause on record; 1 one has no cause, or a run failed; 2 usage; 4 no TRL,
    or a TRL that is not supported.
    """
    for name, known in ((names, RELATIONS), ([each for each in trainers if ":" not in each], RECIPES)):
        for unknown in [each for each in name if each not in known]:
            raise click.ClickException(f"{unknown!r} is not known{suggestion(unknown, tuple(known))}")
    if recipe and trainers:
        raise click.ClickException("--recipe makes the trainer: leave --trainer out")
    trl = versions.installed("trl")
    if unsupported(trl) or trl is None:
        click.echo(f"TRL is {trl or 'not installed'}; {versions.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    asked = (recipe,) if recipe else trainers or tuple(RECIPES)
    task = {"recipe": recipe is not None, "relations": names or tuple(RELATIONS), "having": setting, "on": not off}
    cells = _asked(asked, task, jobs)
    answer: Answer = {"trl_hotfix": __version__, "trl": trl, "patches": not off, "cells": cells}
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(view(answer))
    return Exit.DEGRADED if any(cell["state"] in (VIOLATED, ERROR) for cell in cells) else Exit.FINE


def _asked(trainers: Sequence[str], task: Mapping[str, Any], jobs: int) -> list[CellAnswer]:
    """Return the cells of these trainers. Each trainer has a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, str(number)) for number in range(len(trainers))]

        def run(number: int) -> None:
            _run(outs[number], {**task, "trainer": trainers[number]})

        with progress("trainers", len(trainers)) as advance, ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(run, number) for number in range(len(trainers))]
            while not all(future.done() for future in futures):
                advance(sum(future.done() for future in futures), "")
                time.sleep(0.1)
            for future in futures:
                future.result()
        return [cell for out in outs for cell in _cells(out)]


def _run(out: Path, task: dict[str, Any]) -> None:
    file = out.with_suffix(".task")
    file.write_text(json.dumps(task), encoding="utf-8")
    command = [sys.executable, "-m", f"{PACKAGE}.relations.inside", str(out), str(file)]
    finished = subprocess.run(
        command,
        # The user's own module is where the command was called.
        env={**without_our_variables(), "PYTHONPATH": search_path(["", *sys.path]), "OMP_NUM_THREADS": "1"},
        cwd=out.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
        raise click.ClickException(f"{task['trainer']}: the process ended with code {finished.returncode}: {last}")


def _cells(out: Path) -> Iterator[CellAnswer]:
    for line in out.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
