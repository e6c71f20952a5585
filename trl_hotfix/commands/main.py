"""The entry point of ``python -m trl_hotfix ...`` and ``trl-hotfix ...``."""

from __future__ import annotations

import gc
import io
import itertools
import re
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from .. import __version__
from ..errors import (
    LONG,
    CatalogueError,
    DamagedError,
    NotATrlError,
    PackError,
    SettingError,
    UnknownPatchError,
    printable,
    suggestion,
)
from ..reporting.lines import say
from .common import Exit

NAMES = (
    "list",
    "scan",
    "audit",
    "explain",
    "verify",
    "fingerprint",
    "doctor",
    "run",
    "status",
    "freeze",
    "diff",
    "compare",
    "relations",
    "check",
    "new",
    "pack",
)
"""The commands, in the order of the help."""


_LONG_WORD = re.compile(r"\S{2000,}")


class _Commands(click.Group):
    """The group of all commands. A command's module loads with its first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in NAMES:
            ctx.fail(f"no such command: {name!r}{suggestion(name, NAMES)}")
        command: click.Command = import_module(f".{name}", __package__).command
        return command


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trl_hotfix")
def commands() -> None:
    """Repairs silent training bugs in the TRL that is installed.

    Exit codes: 0 fine, 1 a patch that should be on cannot be, 2 usage, 3 broken patches.yaml (or another data file),
    4 no TRL or none that is supported. `run` has those of the command that it runs.

    --list is another spelling of list --all, and --verify of verify.
    """


def script() -> None:
    """Run ``main`` as the console script, without the garbage collector.

    The process is short and nearly all its objects stay in use, so the collector would only cost time, also at the end.
    """
    gc.disable()
    try:
        main()
    finally:
        gc.freeze()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and exit with one of ``Exit``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Options after the name of a command belong to the command, as in `trl-hotfix run conda env --list`.
    global_options = list(itertools.takewhile(lambda word: word not in (*NAMES, "--"), words))
    for spelling, command in {"--list": ["list", "--all"], "--verify": ["verify"]}.items():
        if spelling in global_options:
            words.remove(spelling)
            words[:0] = command
    code: int
    try:
        code = commands.main(words, prog_name="trl-hotfix", standalone_mode=False) or Exit.FINE
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        _complain(shown.getvalue().rstrip("\n"))
        code = Exit.USAGE
    except click.exceptions.Abort:
        code = Exit.USAGE
    except (NotATrlError, PackError, SettingError, UnknownPatchError) as error:
        _complain(f"trl-hotfix: {error}")
        code = Exit.USAGE
    except (CatalogueError, DamagedError) as error:
        _complain(f"trl-hotfix: {error}")
        code = Exit.CATALOGUE
    sys.exit(code)


def _complain(message: str) -> None:
    """Print an error. It may quote a file or an argument, which may be long, or what a terminal obeys."""
    message = _LONG_WORD.sub(lambda word: printable(word[0], LONG), message)
    say(message, err=True)
