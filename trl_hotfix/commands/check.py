"""``check`` asks a user's own script whether its run trains right."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..checking import process
from ..checking.answers import VIOLATED, Answer
from ..matching import versions
from ..matching.hits import Answer as HitAnswer
from ..reporting.table import show
from . import relations
from .check_screen import view
from .common import Exit, say_json, search_path, unsupported
from .progress import progress

MOST_RUNS = 20
"""A check has about so many runs, for the line of progress."""


class _CheckCommand(click.Command):
    """The command line behind ``--`` belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["command line"] = []
        if "--" in args:
            behind = args.index("--")
            ctx.meta["command line"] = args[behind + 1 :]
            args = args[:behind]
        return super().parse_args(ctx, args)


@click.command("check", cls=_CheckCommand, options_metavar="[OPTIONS]")
@click.argument("script", metavar="SCRIPT [-- ARGUMENTS]", type=click.Path(path_type=Path), required=False)
@click.option("--which", type=click.IntRange(1), default=1, show_default=True, help="The trainer, if it makes several.")
@click.option(
    "--rows", multiple=True, metavar="NAME=FILE", help="The rows of a dataset of the hub: JSON Lines, .csv, .parquet."
)
@click.option(
    "--config", "configs", multiple=True, metavar="NAME=DIR", help="The config and tokenizer of a model of the hub."
)
@click.option(
    "--recipe",
    metavar="MODULE:FUNCTION",
    help="In place of a script: what makes your trainer, as for `relations --recipe`.",
)
@click.option("--online", is_flag=True, help="Read configs, tokenizers and a few rows from the hub, never weights.")
@click.option("--dry-run", is_flag=True, help="Say what the check takes and asks, and ask nothing.")
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what the script and its forks print into FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_context
def command(
    context: click.Context,
    script: Path | None,
    which: int,
    rows: tuple[str, ...],
    configs: tuple[str, ...],
    recipe: str | None,
    online: bool,
    dry_run: bool,
    log: Path | None,
    as_json: bool,
) -> int:
    """Does the run of a training script train right? In about two minutes, on a CPU.

    The script runs until it makes its trainer. There the process forks, and each fork trains two steps with a small
    model: one as the script has it, others with what must change nothing, such as smaller batches with accumulation.

    The code before train() runs again in every fork: its files, requests and prints may repeat. It runs in a folder
    of its own, and nothing goes to the hub.

    Exit codes: 0 fine; 1 the run hits a bug, or a relation of its training does not hold; 2 the script cannot be
    checked, or usage; 4 no TRL, or one that is not supported.
    """
    if (script is None) is (recipe is None):
        raise click.UsageError("expected a training script, or --recipe MODULE:FUNCTION, and not both")
    if recipe is not None:
        code: int = context.invoke(relations.command, recipe=recipe, as_data=as_json)
        return code
    assert script is not None
    if not script.is_file() or script.suffix != ".py":
        found = "this file" if script.exists() else "no such file"
        raise click.ClickException(f"{script}: expected a training script in Python (.py), found {found}")
    if not hasattr(os, "fork"):
        raise click.ClickException("this system cannot fork a process: use --recipe MODULE:FUNCTION")
    trl = versions.installed("trl")
    if unsupported(trl) or trl is None:
        click.echo(f"TRL is {trl or 'not installed'}; {versions.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    task = {
        "script": str(script.absolute()),
        "arguments": context.meta["command line"],
        "which": which,
        "rows": _pairs(rows, "--rows", "NAME=FILE"),
        "configs": _pairs(configs, "--config", "NAME=DIR"),
        "online": online,
        "dry_run": dry_run,
        "log": str(log.absolute()) if log is not None else None,
    }
    with progress("runs", MOST_RUNS) as advance:

        def see(lines: Sequence[Mapping[str, Any]]) -> None:
            steps = [line for line in lines if line["kind"] in ("progress", "relation")]
            advance(min(len(steps), MOST_RUNS), steps[-1].get("on", "") if steps else "")

        answer = process.checked(task, trl, path=search_path(sys.path), see=see)
    if as_json:
        say_json(answer)
    else:
        show(view(answer))
    return _code(answer)


def _pairs(texts: tuple[str, ...], option: str, form: str) -> dict[str, str]:
    found = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not path:
            raise click.ClickException(f"{option}: expected {form}, found {text!r}")
        if not Path(path).exists():
            raise click.ClickException(f"{option} {name}: there is no {path}")
        found[name] = str(Path(path).absolute())
    return found


def _code(answer: Answer) -> int:
    if answer["error"] is not None and answer["trainer"] is None:
        return Exit.USAGE
    is_hit = any(bug["answer"] == HitAnswer.HIT.value for bug in answer["bugs"])
    is_violated = any(
        each["state"] == VIOLATED and (each["part"] == "training" or each["whose"] == "yours") and not _is_meant(each)
        for each in answer["relations"]
    )
    return Exit.DEGRADED if is_hit or is_violated or answer["error"] is not None else Exit.FINE


def _is_meant(relation: Any) -> bool:
    return str(relation["cause"] or "").startswith("meant ")
