"""``run`` starts a command with ``TRL_HOTFIX=1``, after a check that the variable works here."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from .. import settings
from ..api import apply
from ..catalogue.packs import VARIABLE
from .common import Exit, named_and_off, unsupported, with_packs

NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""The exit codes of ``env``, ``nice`` and shells for a command that cannot be started."""


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--strict", is_flag=True, help="A run that hits a bug and is not repaired ends: TRL_HOTFIX=strict.")
@click.option(
    "--strict-all", is_flag=True, help="So does any patch that should be on and is not: TRL_HOTFIX=strict-all."
)
@click.option(
    "--observe", is_flag=True, help="Repair nothing, and name the bugs that the run hits: TRL_HOTFIX=observe."
)
@click.option("--only", metavar="ID,...|@FILE", help="Only these patches: TRL_HOTFIX_ONLY.")
@click.option("--skip", metavar="ID,...", help="Not these: TRL_HOTFIX_SKIP.")
@click.option("--options", metavar="ID.OPTION=CHOICE,...", help="Choices within patches: TRL_HOTFIX_OPTIONS.")
@with_packs
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD...")
def command(
    words: tuple[str, ...],
    strict: bool,
    strict_all: bool,
    observe: bool,
    only: str | None,
    skip: str | None,
    options: str | None,
    packs: str | None,
) -> int:
    """Run CMD with TRL_HOTFIX=1, in place of this process: trl-hotfix run -- accelerate launch train.py

    Every process that CMD starts inherits it. We check the options first: a wrong id, option or file is exit code
    2, and where TRL_HOTFIX=1 cannot work, the exit code is 1. CMD does not start then. A CMD that is not found is 127,
    one that cannot be run is 126; any other exit code is its own.
    """
    if not words[0]:
        raise click.UsageError("CMD is empty")
    if (strict or strict_all) and observe:
        raise click.UsageError("--observe repairs nothing, and --strict needs every repair: leave one out")
    problem = settings.hook_problem()
    if problem is not None:
        click.echo(f"trl-hotfix run: TRL_HOTFIX=1 does nothing here: {problem}. The job was not started.", err=True)
        return Exit.DEGRADED
    variables = _variables(only, skip, options, packs)
    settings.callback_is_on()
    value = _switch(strict=strict, strict_all=strict_all, observe=observe, before=settings.main_switch())
    os.environ.update(variables, TRL_HOTFIX=value)
    # The job will do the same when it imports TRL, so a mistake in its variables is reported here.
    report = apply(dry_run=True)
    if unsupported(report.trl):
        problem = f"TRL {report.trl} is too old" if report.trl else "TRL is not installed"
        click.echo(
            f"trl-hotfix run: {problem} in the environment of {sys.executable}; TRL stays unpatched there", err=True
        )
    if value in settings.STRICT_LEVELS and os.environ.get("TRL_HOTFIX_ONLY", "").strip().startswith("@"):
        off = named_and_off(report)
        if off:
            lines = "".join(f"\n  {status.id}: {status.state.value} ({status.reason.value})" for status in off)
            click.echo(f"trl-hotfix run: strict, and what the freeze file names cannot be on here:{lines}", err=True)
            return Exit.DEGRADED
    return _become(words)


def _switch(*, strict: bool, strict_all: bool, observe: bool, before: str | None) -> str:
    """Return the value of ``TRL_HOTFIX``: that of the options, or else the one that it has."""
    asked = {settings.STRICT_ALL: strict_all, settings.STRICT: strict, settings.OBSERVE: observe}
    kept = before if before in asked else "1"
    return next((value for value, is_asked in asked.items() if is_asked), kept)


def _variables(only: str | None, skip: str | None, options: str | None, packs: str | None) -> dict[str, str]:
    """Return the environment variables for the options on the command line."""
    if only is not None and not only.strip(" ,"):
        raise click.UsageError("--only names no patch; leave it out if you mean all")
    if only is not None and only.strip().startswith("@"):
        if skip is not None or options is not None:
            raise click.UsageError(f"--only {only} applies exactly what the file names: leave --skip and --options out")
        # The path is made absolute, since a worker may be started in another folder.
        only = f"@{Path(only.strip()[1:]).absolute()}"
    variables = {"TRL_HOTFIX_ONLY": only, "TRL_HOTFIX_SKIP": skip, "TRL_HOTFIX_OPTIONS": options, VARIABLE: packs}
    return {name: value for name, value in variables.items() if value is not None}


def _become(words: tuple[str, ...]) -> int:
    """Run the command in place of this process. Returns only if it cannot be started."""
    # Python ignores these signals, and the command would inherit that: `trl-hotfix run -- yes | head` would not end.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, os.environ)
    except FileNotFoundError:
        problem, code = "is not found, or the interpreter that its first line names is not", NOT_FOUND
    except OSError as error:
        problem, code = f"cannot be run: {error.strerror}", NOT_EXECUTABLE
    click.echo(f"trl-hotfix run: {words[0]!r} {problem}", err=True)
    return code
