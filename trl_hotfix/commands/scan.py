"""``scan`` tells from the text of a training script which known bugs it hits."""

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
from ..matching.hits import Finding
from ..reporting.table import show
from ..scanning.hits import ScannedTrainer, judge
from ..scanning.scripts import read
from ..scanning.trainer_calls import TrainerCall
from .common import Exit, release, trainer, unsupported, with_packs


class Bug(TypedDict):
    """A bug that is hit, or that the script may hit. ``lines`` are those of the arguments that decide."""

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
    judged = release(trl) if trl is not None else installed
    patches = loading.known(named(packs, os.environ))
    if judged is None or unsupported(judged):
        problem = f"TRL is {judged or 'not installed'}"
        click.echo(f"{problem}; {versions.SUPPORTED} is needed, installed or given, as in --trl 0.12.2", err=True)
        return Exit.NO_TRL
    try:
        if trainer_name is not None and path.suffix.lower() not in (".yaml", ".yml"):
            raise ScriptError("--trainer is for a YAML config; a script says itself which trainers it makes")
        calls = read(path, trainer(trainer_name, patches) if trainer_name is not None else None)
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    trainers = [judge(call, patches, judged, other_release=judged != installed) for call in calls]
    if as_data:
        click.echo(json.dumps(_answer(path, judged, trainers), indent=2))
    else:
        _print(path, judged, trainers)
    clear = bool(trainers) and not any(scanned.hits or scanned.unsure for scanned in trainers)
    return Exit.FINE if clear else Exit.DEGRADED


def _answer(path: Path, trl: str, trainers: list[ScannedTrainer]) -> Answer:
    rows = [_trainer(scanned) for scanned in trainers]
    return {"trl_hotfix": __version__, "trl": trl, "file": str(path), "trainers": rows}


def _trainer(scanned: ScannedTrainer) -> Trainer:
    return {
        "trainer": f"{scanned.call.name}Trainer",
        "called": scanned.call.called,
        "line": scanned.call.line,
        "hits": [_bug(finding) for finding in scanned.hits],
        "cannot_tell": [_bug(finding) for finding in scanned.unsure],
        "rest": scanned.not_hit,
    }


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


def _print(path: Path, trl: str, trainers: list[ScannedTrainer]) -> None:
    file = plain(str(path))
    if not trainers:
        click.echo(f"{file}: no trainer of TRL is made in it")
    for scanned in trainers:
        call, hits, unsure = scanned.call, len(scanned.hits), len(scanned.unsure)
        click.echo(f"{file}, line {call.line}: {_title(call)} on TRL {trl}")
        if hits or unsure:
            show(_table(scanned))
        not_hit = f"{scanned.not_hit} of the {scanned.not_hit + hits + unsure} known bugs"
        click.echo(f"{hits} hit, {unsure} cannot be told; {not_hit} it does not hit.\n")


def _title(call: TrainerCall) -> str:
    """Return the trainer's class in TRL, behind the name in the script if that is another one."""
    trainer_class = f"{call.name}Trainer"
    return trainer_class if call.called in (call.name, trainer_class) else f"{call.called} ({trainer_class})"


def _table(scanned: ScannedTrainer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("answer", "patch", "severity", "line", "what happens", "why", "patch is"):
        table.add_column(column, overflow="fold")
    for finding in (*scanned.hits, *scanned.unsure):
        hit = finding in scanned.hits
        patch, lines = finding.patch, ", ".join(map(str, finding.lines))
        reasons = "; ".join(finding.because if hit else (*finding.unknown, *finding.because))
        table.add_row(
            Text(finding.answer.value, style="bold red" if hit else "yellow"),
            *map(Text, (patch.id, patch.severity.value, lines, finding.symptom, reasons)),
            Text("on by default" if patch.default else "off unless named"),
        )
    return table
