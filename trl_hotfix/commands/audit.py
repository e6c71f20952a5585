"""``audit`` shows which known bugs a set of pins brings, and which of them hit an old run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..errors import ScriptError
from ..matching import versions
from ..model import Severity
from .accepted import Ignores, is_due, today, with_ignores
from .audit_answer import CANNOT_TELL, Answer, accept
from .audit_formats import FORMATS
from .audit_pins import audit_pins
from .audit_run import audit_run
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
from .gate import as_severe, with_severity
from .repairs import repaired_by_run, with_policy


@click.command("audit")
@click.argument("path", metavar="FILE|FOLDER", type=click.Path(path_type=Path))
@click.option("--trl", metavar="VERSION", help="The release of TRL, if the file or the run does not tell it.")
@with_versions
@click.option("--trainers", metavar="NAME,...", help="Only the bugs of these trainers, such as DPO,SFT.")
@click.option("--all", "everything", is_flag=True, help="The bugs of all trainers, whatever the scripts.")
@click.option("--format", "format_name", type=click.Choice(list(FORMATS)), default="text", show_default=True)
@click.option("--json", "as_data", is_flag=True, help="The same as --format json.")
@click.option(
    "--fail-on",
    type=click.Choice(["hit", "unrepaired", "never"]),
    default="hit",
    show_default=True,
    help="When the exit code is 1. unrepaired: a bug that a run would not repair.",
)
@with_severity
@with_ignores
@with_policy
@with_packs
def command(
    path: Path,
    trl: str | None,
    versions_told: tuple[str, ...],
    trainers: str | None,
    everything: bool,
    format_name: str,
    as_data: bool,
    fail_on: str,
    severity: str | None,
    ignored: tuple[str, ...],
    policy: Path | None,
    packs: str | None,
) -> int:
    """Which known bugs a set of pins brings, or which of them hit an old run.

    FILE has pinned versions: requirements.txt, pip freeze, uv.lock, pylock.toml, poetry.lock, environment.yml. If there
    are scripts in its folder, it shows only what hits them, or may. FOLDER
    is the output folder of a run, or one of its checkpoints: its model card has the versions, and training_args.bin the
    arguments; audit reads it as data, and runs nothing. We do not know what a run got besides its config. The run's
    record comes before these files, since it asked the trainer when training began. --trl and
    --with come before the versions of any file.

    Exit codes: 0 no bug; 1 the pins bring a bug, the run was hit by one that its record does not repair, or the review
    of an ignore is due; 2 the file cannot be read, or usage; 4 the release of TRL is too old.
    """
    bugs = known_bugs(packs)
    shown = as_severe([bug for bug in bugs if bug.severity is not Severity.DIAGNOSIS], severity)
    told = told_versions(versions_told) | ({"trl": release(trl)} if trl is not None else {})
    names = [trainer(name.strip(), bugs) for name in (trainers or "").split(",") if name.strip()]
    try:
        # `pathlib` raises for a name that is too long to be one of a file.
        is_folder = os.path.isdir(path)  # noqa: PTH112
        answer = audit_run(path, told, shown) if is_folder else audit_pins(path, told, shown, names, everything)
        accept(answer, Ignores(ignored, bugs, shown, today()))
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    if unsupported(answer["trl"]):
        click.echo(f"TRL is {answer['trl']}; {versions.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    warn_of_unproven(answer["trl"])
    if policy is not None or fail_on == "unrepaired":
        repaired = repaired_by_run(answer["trl"], answer["versions"], policy, packs)
        for bug in (*answer["bugs"], *answer["accepted"]):
            bug["run_repairs"] = bug["id"] in repaired
    FORMATS["json" if as_data else format_name](answer, shown)
    return Exit.DEGRADED if _fails(answer, fail_on) else Exit.FINE


def _fails(answer: Answer, fail_on: str) -> bool:
    if fail_on == "never":
        return False
    certain = [bug for bug in answer["bugs"] if bug["answer"] != CANNOT_TELL and bug["repaired"] != "repaired"]
    return is_due(answer["ignores"]) or any(fail_on == "hit" or not bug["run_repairs"] for bug in certain)
