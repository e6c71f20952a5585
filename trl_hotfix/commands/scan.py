"""``scan``: which known bugs a training script hits, from its text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypedDict

import click
from rich import box
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..catalogue import loading
from ..catalogue.packs import named
from ..errors import ScriptError, plain
from ..matching import versions
from ..reporting.table import show
from ..scan import Finding, Scanned, judge
from ..scripts import read
from .common import Exit, release, trainer, unsupported, with_packs


class Bug(TypedDict):
    """A bug that is hit, or of which nobody can tell from the script. ``lines`` are those of what decides."""

    id: str
    severity: str
    symptom: str
    lines: list[int]
    because: list[str]
    unknown: list[str]
    on_by_default: bool


class Trainer(TypedDict):
    """A trainer of the script. ``rest`` is the number of known bugs that it does not hit."""

    trainer: str
    called: str
    line: int
    hits: list[Bug]
    cannot_tell: list[Bug]
    rest: int


class Answer(TypedDict):
    """What ``scan --json`` prints."""

    trl_hotfix: str
    trl: str
    file: str
    trainers: list[Trainer]


@click.command("scan")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--trl", metavar="VERSION", help="This release of TRL instead of the installed one.")
@click.option(
    "--trainer", "trainer_name", metavar="NAME", help="The trainer that a YAML config is for, such as DPO or SFT."
)
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
@with_packs
def command(path: Path, trl: str | None, trainer_name: str | None, as_data: bool, packs: str | None) -> int:
    """Which known bugs a training script (.py) or a config of TRL's command line (.yaml) hits, and which it may.

    The file is read, and never run or imported. A bug cannot be told where it needs something of the model, the data or
    the machine that no script says, or an argument that is not a literal. What the command line adds to a config is not
    in the file. Beside the release of --trl, other distributions are taken to be those that are installed here.

    \b
    Exit codes: 0 nothing is hit, and nothing is left untold; 1 a bug is hit, or one cannot be told, or the file
    makes no trainer of TRL; 2 the file cannot be read, or usage; 4 no TRL here and no --trl.
    """
    installed = versions.installed("trl")
    looked_at = release(trl) if trl is not None else installed
    patches = loading.known(named(packs, os.environ))
    if looked_at is None or unsupported(looked_at):
        found = f"TRL is {looked_at or 'not installed'}"
        click.echo(f"{found}; {versions.SUPPORTED} is needed, installed or given, as in --trl 0.12.2", err=True)
        return Exit.NO_TRL
    try:
        if trainer_name is not None and path.suffix.lower() not in (".yaml", ".yml"):
            raise ScriptError("--trainer is for a YAML config; a script says itself which trainers it makes")
        made = read(path, trainer(trainer_name, patches) if trainer_name is not None else None)
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    scanned = [judge(each, patches, looked_at, elsewhere=looked_at != installed) for each in made]
    if as_data:
        click.echo(json.dumps(_answer(path, looked_at, scanned), indent=2))
    else:
        _print(path, looked_at, scanned)
    return Exit.DEGRADED if not scanned or any(each.hits or each.unsure for each in scanned) else Exit.FINE


def _answer(path: Path, trl: str, scanned: list[Scanned]) -> Answer:
    trainers: list[Trainer] = [
        {
            "trainer": f"{each.made.name}Trainer",
            "called": each.made.called,
            "line": each.made.line,
            "hits": [_bug(finding) for finding in each.hits],
            "cannot_tell": [_bug(finding) for finding in each.unsure],
            "rest": each.rest,
        }
        for each in scanned
    ]
    return {"trl_hotfix": __version__, "trl": trl, "file": str(path), "trainers": trainers}


def _bug(finding: Finding) -> Bug:
    return {
        "id": finding.patch.id,
        "severity": finding.patch.severity.value,
        "symptom": finding.symptom,
        "lines": list(finding.lines),
        "because": list(finding.because),
        "unknown": list(finding.unknown),
        "on_by_default": finding.patch.default,
    }


def _print(path: Path, trl: str, scanned: list[Scanned]) -> None:
    where = plain(str(path))
    if not scanned:
        click.echo(f"{where}: no trainer of TRL is made in it")
    for each in scanned:
        made = each.made
        called = f"{made.name}Trainer" if made.called in (made.name, f"{made.name}Trainer") else made.called
        derived = "" if called == f"{made.name}Trainer" else f" ({made.name}Trainer)"
        click.echo(f"{where}, line {made.line}: {called}{derived} on TRL {trl}")
        if each.hits or each.unsure:
            show(_table(each))
        others = f"{each.rest} of the {each.rest + len(each.hits) + len(each.unsure)} known bugs"
        click.echo(f"{len(each.hits)} hit, {len(each.unsure)} cannot be told; {others} it does not hit.\n")


def _table(scanned: Scanned) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("answer", "patch", "severity", "line", "what happens", "why", "patch is"):
        view.add_column(column, overflow="fold")
    for each in (*scanned.hits, *scanned.unsure):
        hit = each in scanned.hits
        why = "; ".join(each.because) if hit else "; ".join((*each.unknown, *each.because))
        view.add_row(
            Text(each.answer.value, style="bold red" if hit else "yellow"),
            *map(Text, (each.patch.id, each.patch.severity.value, ", ".join(map(str, each.lines)), each.symptom, why)),
            Text("on by default" if each.patch.default else "off unless named"),
        )
    return view
