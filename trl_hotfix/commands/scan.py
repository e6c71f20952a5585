"""``scan`` tells from the text of training scripts which known bugs they hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from .. import __version__
from ..catalogue.conditions import Argument
from ..errors import ScriptError
from ..matching import versions
from ..matching.hits import Finding
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import repair_of
from ..scanning.command_lines import CommandLine
from ..scanning.facts import facts_for, told_facts
from ..scanning.files import files_to_scan
from ..scanning.hits import ScannedTrainer, judge
from ..scanning.scripts import read
from ..scanning.trainer_calls import TrainerCall
from .common import Exit, known_bugs, release, told_versions, trainer, unsupported, with_packs, with_versions
from .scan_answer import Answer, Bug, File, Trainer
from .scan_formats import FORMATS


class _ScanCommand(click.Command):
    """What stands behind ``--`` is the command line of the script, and not of this command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            behind = args.index("--")
            ctx.meta["command line"] = args[behind + 1 :]
            args = args[:behind]
        return super().parse_args(ctx, args)


@click.command("scan", cls=_ScanCommand, options_metavar="[OPTIONS]")
@click.argument("paths", metavar="FILE... [-- ARGUMENTS]", nargs=-1, required=True)
@click.option("--trl", metavar="VERSION", help="This release of TRL instead of the installed one.")
@with_versions
@click.option(
    "--trainer", "trainer_name", metavar="NAME", help="The trainer that a YAML config is for, such as DPO or SFT."
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the model that the trainers train: its config, tokenizer and generation config.",
)
@click.option(
    "--dataset",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The dataset that the trainers are given to train on, with all of its rows, as JSON Lines.",
)
@click.option(
    "--accelerate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The config of accelerate that the script is launched with: DeepSpeed, FSDP, the number of processes.",
)
@click.option(
    "--deepspeed",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The config of DeepSpeed that the script trains with, as JSON: its ZeRO stage, and what it offloads.",
)
@click.option("--all", "everything", is_flag=True, help="Also diagnoses, and patches that are off unless named.")
@click.option("--format", "format_name", type=click.Choice(list(FORMATS)), default="text", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option(
    "--fail-on",
    type=click.Choice(["hit", "unknown", "never"]),
    default="hit",
    show_default=True,
    help="When the exit code is 1.",
)
@with_packs
@click.pass_context
def command(
    context: click.Context,
    paths: tuple[str, ...],
    trl: str | None,
    versions_told: tuple[str, ...],
    trainer_name: str | None,
    model: Path | None,
    dataset: Path | None,
    accelerate: Path | None,
    deepspeed: Path | None,
    everything: bool,
    format_name: str,
    as_json: bool,
    fail_on: str,
    packs: str | None,
) -> int:
    """Which known bugs training scripts (.py, .ipynb) or configs of TRL's command line (.yaml) hit, and which they may.

    A folder stands for the scripts and notebooks in it. Files are read, and never run or imported. A bug cannot be told
    where it needs something of the model, the data or the machine that no script says, or a value that the text does
    not tell for certain. If the script parses its command line, tell it: scan train.py -- --beta 0.1 --config c.yaml.
    --model, --dataset, --accelerate and --deepspeed tell what no script says.
    Beside the release of --trl, other distributions are taken to be those that are installed here, or those of --with.

    \b
    Exit codes: 0 fine; 1 a bug is hit (with --fail-on unknown also: one cannot be told, a file of a folder cannot be
    read, or nothing makes a trainer of TRL); 2 a file cannot be read, or usage; 4 no TRL here and no --trl.
    """
    installed = versions.installed("trl")
    judged = release(trl) if trl is not None else installed
    bugs = known_bugs(packs)
    if judged is None or unsupported(judged):
        problem = f"TRL is {judged or 'not installed'}"
        click.echo(f"{problem}; {versions.SUPPORTED} is needed, installed or given, as in --trl 0.12.2", err=True)
        return Exit.NO_TRL
    shown = [bug for bug in bugs if everything or _is_shown(bug)]
    yaml_trainer = trainer(trainer_name, bugs) if trainer_name is not None else None
    told = told_versions(versions_told)
    try:
        facts = told_facts(model, accelerate, dataset, deepspeed)
        scan = _Scan(shown, judged, judged != installed, told, context.meta.get("command line"), facts)
        files, scanned = scan.files(paths, yaml_trainer)
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    answer: Answer = {
        "trl_hotfix": __version__,
        "trl": judged,
        "model": str(model) if model is not None else None,
        "dataset": str(dataset) if dataset is not None else None,
        "accelerate": str(accelerate) if accelerate is not None else None,
        "deepspeed": str(deepspeed) if deepspeed is not None else None,
        "scanned": scanned,
        "files": files,
    }
    FORMATS["json" if as_json else format_name](answer, shown)
    return _exit_code(answer, fail_on)


def _is_shown(bug: AnyBug) -> bool:
    """Leave out diagnoses, and what is a bug to those only who say so by naming its patch."""
    return repair_of(bug) != "if named" and bug.severity is not Severity.DIAGNOSIS


class _Scan:
    """Scan files for some bugs on one release of TRL."""

    def __init__(
        self,
        bugs: Sequence[AnyBug],
        trl: str,
        other_release: bool,
        versions_told: Mapping[str, str],
        words: Sequence[str] | None,
        facts: Mapping[str, Argument],
    ) -> None:
        self._bugs, self._trl, self._other_release = bugs, trl, other_release
        self._versions_told = versions_told
        self._words, self._facts = words or (), facts
        self._command_line = CommandLine.parse(words) if words is not None else None

    def files(self, paths: Sequence[str], yaml_trainer: str | None) -> tuple[list[File], int]:
        """Scan files and folders. Return what to show of them, and how many there are.

        Raises ``ScriptError`` for a file that is named and cannot be scanned.
        """
        files = files_to_scan(paths)
        if yaml_trainer is not None and any(path.suffix.lower() not in (".yaml", ".yml") for path, _ in files):
            raise ScriptError("--trainer is for a YAML config; a script says itself which trainers it makes")
        scanned = [self._scan(path, is_named, yaml_trainer) for path, is_named in files]
        shown = [
            file
            for file, (_, is_named) in zip(scanned, files, strict=True)
            if is_named or file["trainers"] or file["error"] is not None
        ]
        return shown, len(files)

    def _scan(self, path: Path, is_named: bool, yaml_trainer: str | None) -> File:
        try:
            calls = read(path, yaml_trainer, self._command_line)
        except ScriptError as error:
            if is_named:
                raise
            return {"file": str(path), "error": str(error), "trainers": []}
        fact = facts_for(self._text(path), self._facts) if self._facts else None
        trainers = [
            judge(call, self._bugs, self._trl, other_release=self._other_release, told=self._versions_told, fact=fact)
            for call in calls
        ]
        return {"file": str(path), "error": None, "trainers": [_trainer(scanned) for scanned in trainers]}

    def _text(self, path: Path) -> str:
        """Return the text of a script and of its command line, in which a word may set what the files say."""
        config = [] if self._command_line is None else [str(dict(self._command_line.values))]
        return " ".join([path.read_text(encoding="utf-8", errors="replace"), *self._words, *config])


def _trainer(scanned: ScannedTrainer) -> Trainer:
    call = scanned.call
    return {
        "trainer": f"{call.name}Trainer",
        "called": call.called,
        "line": call.line,
        "position": call.position(call.line),
        "hits": [_bug(finding, call) for finding in scanned.hits],
        "cannot_tell": [_bug(finding, call) for finding in scanned.unsure],
        "rest": scanned.not_hit,
    }


def _bug(finding: Finding, call: TrainerCall) -> Bug:
    return {
        "id": finding.patch.id,
        "title": finding.patch.title,
        "severity": finding.patch.severity.value,
        "symptom": finding.symptom,
        "lines": list(finding.lines),
        "positions": [call.position(line) for line in finding.lines],
        "because": list(finding.because),
        "unknown": list(finding.unknown),
        "on_by_default": repair_of(finding.patch) == "by default",
        "repair": repair_of(finding.patch),
        "fixed_in": finding.patch.upstream.fixed_in,
    }


def _exit_code(answer: Answer, fail_on: str) -> int:
    trainers = [trainer for file in answer["files"] for trainer in file["trainers"]]
    hit = any(trainer["hits"] for trainer in trainers)
    untold = not trainers or any(trainer["cannot_tell"] for trainer in trainers)
    unreadable = any(file["error"] is not None for file in answer["files"])
    fails = {"hit": hit, "unknown": hit or untold or unreadable, "never": False}
    return Exit.DEGRADED if fails[fail_on] else Exit.FINE
