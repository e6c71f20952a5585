"""``scan`` tells from the text of training scripts which known bugs they hit."""

from __future__ import annotations

from pathlib import Path

import click

from .. import __version__
from ..errors import ScriptError
from ..matching import versions
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import repair_of
from ..scanning.facts import told_facts
from .accepted import Ignores, today, with_ignores
from .ask_more import Asker
from .common import (
    Exit,
    known_bugs,
    release,
    told_versions,
    trainer,
    unsupported,
    warn_of_unproven,
    with_packs,
    with_versions,
)
from .gate import as_severe, fails, with_severity
from .repairs import repaired_by_run, with_policy
from .scan_answer import Answer
from .scan_files import Scan
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
    help="The dataset that the trainers are given to train on, with all rows: JSON Lines, .json, .csv or .parquet.",
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
    type=click.Choice(["hit", "unrepaired", "unknown", "never"]),
    default="hit",
    show_default=True,
    help="When the exit code is 1. unrepaired: a hit that the run would not repair.",
)
@with_severity
@with_ignores
@with_policy
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
    severity: str | None,
    ignored: tuple[str, ...],
    policy: Path | None,
    packs: str | None,
) -> int:
    """Which known bugs training scripts (.py, .ipynb) or configs of TRL's command line (.yaml) hit, and which they may.

    A folder stands for the scripts and notebooks in it. scan reads files, and never runs or imports them. scan cannot
    tell
    about a bug that needs something of the model, the data or the machine that no script says, or a value that the
    text does not settle. If the script parses its command line, give it: scan train.py -- --beta 0.1 --config c.yaml.
    --model, --dataset, --accelerate and --deepspeed give what no script says.

    Beside the release of --trl, scan takes other distributions as installed here, or as --with gives them.

    Exit codes: 0 fine; 1 a bug is hit, or the review of an ignore is due (with --fail-on unknown also: scan cannot tell
    about one, a file of a folder cannot be read, a trainer may be made where it cannot be seen, or nothing makes a
    trainer of TRL); 2 a file cannot be read, a folder has no script, an ignore is wrong, or usage; 4 no TRL here and
    no --trl.
    """
    installed = versions.installed("trl")
    judged = release(trl) if trl is not None else installed
    bugs = known_bugs(packs)
    if judged is None or unsupported(judged):
        problem = f"TRL is {judged or 'not installed'}"
        click.echo(f"{problem}; {versions.SUPPORTED} is needed, installed or given, as in --trl 0.12.2", err=True)
        return Exit.NO_TRL
    warn_of_unproven(judged)
    shown = as_severe([bug for bug in bugs if everything or _is_shown(bug)], severity)
    yaml_trainer = trainer(trainer_name, bugs) if trainer_name is not None else None
    told = told_versions(versions_told)
    asked = policy is not None or fail_on == "unrepaired"
    repaired = repaired_by_run(judged, told, policy, packs) if asked else None
    try:
        facts = told_facts(model, accelerate, dataset, deepspeed)
        files_told = {"--model": model, "--dataset": dataset, "--accelerate": accelerate, "--deepspeed": deepspeed}
        given = {
            "--with": [f"{name}=={version}" for name, version in told.items()],
            "--trainer": [trainer_name] if trainer_name is not None else [],
            **{option: [str(file)] for option, file in files_told.items() if file is not None},
        }
        asker = Asker(judged, given, context.meta.get("command line"))
        ignores = Ignores(ignored, bugs, shown, today())
        words = context.meta.get("command line")
        scan = Scan(shown, judged, judged != installed, told, words, facts, ignores, repaired, asker)
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
        "ignores": ignores.problems(),
    }
    FORMATS["json" if as_json else format_name](answer, shown)
    return Exit.DEGRADED if fails(answer, fail_on) else Exit.FINE


def _is_shown(bug: AnyBug) -> bool:
    """Leave out diagnoses, and what is a bug to those only who say so by naming its patch."""
    return repair_of(bug) != "if named" and bug.severity is not Severity.DIAGNOSIS
