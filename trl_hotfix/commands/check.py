"""``check`` asks a user's own script whether its run trains right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..checking import environment
from ..checking.answers import VIOLATED, Answer
from ..checking.not_checked import NOT_CHECKED
from ..matching import versions
from ..matching.hits import Answer as HitAnswer
from ..reporting.table import show
from .check_screen import view
from .common import Exit, say_json, search_path, unsupported
from .progress import progress

PACKAGE = __package__.partition(".")[0]
MOST_RUNS = 20
"""About so many runs has a check, for the line of progress."""


class _CheckCommand(click.Command):
    """What stands behind ``--`` is the command line of the script, and not of this command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["command line"] = []
        if "--" in args:
            behind = args.index("--")
            ctx.meta["command line"] = args[behind + 1 :]
            args = args[:behind]
        return super().parse_args(ctx, args)


@click.command("check", cls=_CheckCommand, options_metavar="[OPTIONS]")
@click.argument("script", metavar="SCRIPT [-- ARGUMENTS]", type=click.Path(path_type=Path))
@click.option("--which", type=click.IntRange(1), default=1, show_default=True, help="The trainer, if it makes several.")
@click.option(
    "--rows", multiple=True, metavar="NAME=FILE", help="The rows of a dataset of the hub: JSON Lines, .csv, .parquet."
)
@click.option(
    "--config", "configs", multiple=True, metavar="NAME=DIR", help="The config and tokenizer of a model of the hub."
)
@click.option("--online", is_flag=True, help="Read configs, tokenizers and a few rows from the hub, never weights.")
@click.option("--recipe", metavar="MODULE:FUNCTION", help="Where no process can fork: see relations --recipe.")
@click.option("--dry-run", is_flag=True, help="Say what the check takes and asks, and ask nothing.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_context
def command(
    context: click.Context,
    script: Path,
    which: int,
    rows: tuple[str, ...],
    configs: tuple[str, ...],
    online: bool,
    recipe: str | None,
    dry_run: bool,
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
    if not script.is_file():
        raise click.ClickException(f"{script}: there is no such file; expected a training script")
    if not hasattr(os, "fork"):
        raise click.ClickException(
            "this system cannot fork a process: use trl-hotfix relations --recipe MODULE:FUNCTION"
        )
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
        "whole": False,
    }
    answer = _checked(task, trl)
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


def _checked(task: dict[str, Any], trl: str) -> Answer:
    begin = time.monotonic()
    answer: Answer = {
        "trl_hotfix": __version__,
        "trl": trl,
        "script": task["script"],
        "trainer": None,
        "of_trl": None,
        "place": None,
        "error": None,
        "taken": [],
        "noted": [],
        "not_checked": list(NOT_CHECKED),
        "would_ask": [],
        "bugs": [],
        "relations": [],
        "runs": 0,
        "seconds": 0.0,
    }
    with tempfile.TemporaryDirectory(prefix="check-") as made:
        # A link in its path would make every file in it stand elsewhere.
        folder = Path(made).resolve()
        for name in ("work", "out"):
            (folder / name).mkdir()
        environment.mirror(Path.cwd(), folder / "work")
        out = _run({**task, "folder": str(folder / "work")}, folder)
        for line in out:
            _take(answer, line)
    answer["seconds"] = round(time.monotonic() - begin, 1)
    return answer


def _take(answer: Answer, line: dict[str, Any]) -> None:
    kind = line.pop("kind")
    if kind == "trainer":
        answer.update(line)  # type: ignore[typeddict-item]
    elif kind == "relation":
        answer["relations"].append(line)  # type: ignore[arg-type]
    elif kind in ("taken", "noted"):
        answer[kind].append(line["text"])  # type: ignore[literal-required]
    elif kind == "would":
        answer["would_ask"].append(line)  # type: ignore[arg-type]
    elif kind == "error":
        answer["error"] = line["text"]
    elif kind == "runs":
        answer["runs"] = line["count"]


def _run(task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run the check in a process of its own, and return what it has written."""
    file, out = folder / "out" / "task", folder / "out" / "lines"
    file.write_text(json.dumps(task), encoding="utf-8")
    out.touch()
    command = [sys.executable, "-m", f"{PACKAGE}.checking.inside", str(out), str(file)]
    offline = {} if task["online"] else environment.OFFLINE
    variables = {**os.environ, **environment.VARIABLES, **offline, "PYTHONPATH": search_path(sys.path)}
    with (folder / "out" / "log").open("w+b") as log, progress("runs", MOST_RUNS) as advance:
        process = subprocess.Popen(
            command, env=variables, cwd=task["folder"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while process.poll() is None:
                lines = _lines(out)
                seen = [line for line in lines if line["kind"] in ("progress", "relation")]
                advance(min(len(seen), MOST_RUNS), seen[-1].get("on", "") if seen else "")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        lines = _lines(out)
        if process.returncode and not any(line["kind"] == "error" for line in lines):
            log.seek(0)
            last = (log.read().decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
            lines.append({"kind": "error", "text": f"the process ended with code {process.returncode}: {last}"})
        keep = os.environ.get("TRL_HOTFIX_CHECK_LOG")
        if keep:
            log.seek(0)
            Path(keep).write_bytes(log.read())
    return lines


def _lines(out: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in out.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]
