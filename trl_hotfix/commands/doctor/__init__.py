"""``doctor`` reports the problems of an installation, and the facts that belong into an issue.

``answer`` is the shape of what it says, ``screen`` shows it. ``environment`` inspects this Python, ``variables`` those
that are set, ``data_files`` those of this package, and ``start_hook`` whether a fresh Python starts with the patches.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import click
from packaging.version import InvalidVersion

from ... import __version__, settings
from ...api import apply
from ...catalogue.data_files import PACKAGE
from ...errors import MANY, HotfixError
from ...matching import versions
from ...model import State
from ...reporting.sentences import because
from ..common import Exit, named_and_off, unsupported, with_packs
from .answer import Answer, Patcher, Problems
from .data_files import counted_files
from .environment import LOOK, PACKAGES, PATCHERS, installed_packs, installed_trl, pth_files, this_python
from .screen import print_answer
from .start_hook import start_hook
from .variables import checked_variables


@click.command("doctor")
@click.option("--json", "as_data", is_flag=True, help="All of it as JSON.")
@with_packs
def command(as_data: bool, packs: str | None) -> int:
    """Why does it not work here? What is installed, set and found, to be pasted into an issue; problems first.

    Starts a fresh Python to see whether TRL_HOTFIX=1 reaches it. It shows no variables but those of TRL_HOTFIX, and
    home folders as ~. The exit code is 2 for a setting that stops `import trl`, such as a broken policy,
    and 1 for any other problem.
    """
    problems = Problems()
    answer = _examined(packs, problems)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        print_answer(answer)
    if not answer["trl"]["supported"]:
        return Exit.NO_TRL
    # With TRL_HOTFIX=0 no other variable is read.
    if problems.stops_import is not None and settings.switch(os.environ.get("TRL_HOTFIX", "") or "unset") != "off":
        raise problems.stops_import
    return Exit.DEGRADED if answer["problems"] else Exit.FINE


def _examined(packs: str | None, problems: Problems) -> Answer:
    trl = installed_trl(problems)
    hook, finders = start_hook(problems)
    packages = {name: versions.installed(name) for name in PACKAGES}
    if packages["wrapt"] is None:
        problems.add("wrapt, which trl_hotfix needs, is not installed", "install trl_hotfix again, with what it needs")
    files, patches = counted_files(packs, problems)
    variables = checked_variables(patches, packs, problems)
    applies, digest = _patch_set(packs, problems)
    answer = Answer(
        trl_hotfix=__version__,
        folder=str(PACKAGE),
        problems=problems.entries,
        python=this_python(),
        trl=trl,
        packages=packages,
        hook=hook,
        variables=variables,
        patchers=[
            Patcher(name=name, version=version, does=does, look=LOOK)
            for name, does in PATCHERS.items()
            if (version := versions.installed(name)) is not None
        ],
        finders=finders,
        pth=pth_files(),
        files=files,
        packs=installed_packs(packs),
        applies=applies,
        digest=digest,
    )
    private: Answer = _without_home(answer)
    return private


def _patch_set(packs: str | None, problems: Problems) -> tuple[int | None, str | None]:
    """Return the number of patches that would be on here, and the digest of the set."""
    try:
        report = apply(dry_run=True, packs=packs)
    except HotfixError as error:
        problems.note(error)
        if not any(str(error) in entry["problem"] for entry in problems.entries):
            problems.add(str(error), "correct it: until then TRL stays unpatched")
        return None, None
    except InvalidVersion as error:
        problems.add(f"an installed version is not a version: {error}", "install that distribution again")
        return None, None
    off = [] if unsupported(report.trl) else named_and_off(report)
    if off:
        shown = [f"{status.id} ({status.reason.value}: {because(status.reason, status.evidence)})" for status in off]
        more = f"; and {len(off) - MANY} more" if len(off) > MANY else ""
        problems.add(
            f"you named what cannot be on here: {'; '.join(shown[:MANY])}{more}",
            f"trl-hotfix explain {off[0].id} shows each gate; take a policy for this TRL, or leave out what is named",
        )
    return sum(status.state is State.PENDING for status in report), report.digest


def _without_home(value: Any) -> Any:
    """Return ``value`` with ``~`` for the home folder in every text, since that folder mostly has its owner's name."""
    if isinstance(value, Mapping):
        return {key: _without_home(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_without_home(element) for element in value]
    if not isinstance(value, str):
        return value
    home = os.path.expanduser("~")  # noqa: PTH111  pathlib raises where a container's user has no home
    for folder in sorted({home, os.path.realpath(home)} - {"~", "", os.sep}, key=len, reverse=True):
        value = re.sub(rf"(?<![\w.~/\\-]){re.escape(folder.rstrip(os.sep))}(?![\w.-])", "~", value)
    return value
