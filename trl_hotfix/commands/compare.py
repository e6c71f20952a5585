"""``compare`` tells which known bugs an upgrade of TRL repairs, which stay, and which it brings."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import click
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from .. import __version__
from ..catalogue import loading
from ..catalogue.packs import named
from ..errors import ScriptError
from ..matching import gates, versions
from ..matching.fingerprints import bodies
from ..matching.hits import Answer as HitAnswer
from ..model import Patch, Severity
from ..reporting.table import show
from ..scanning.hits import judge
from ..scanning.scripts import read
from ..scanning.trainer_calls import TrainerCall
from .common import Exit, release, unsupported, with_packs


class Bug(TypedDict):
    """A known bug. ``hits``: whether it hits the script on the release that has it; None without a script."""

    id: str
    title: str
    severity: str
    on_by_default: bool
    hits: str | None


class Answer(TypedDict):
    """What ``compare --json`` prints. ``newer_than_evidence``: nobody has looked for the bugs of these releases."""

    trl_hotfix: str
    first: str
    second: str
    script: str | None
    repaired: list[Bug]
    stay: list[Bug]
    brought: list[Bug]
    newer_than_evidence: list[str]


@click.command("compare")
@click.argument("first", metavar="RELEASE")
@click.argument("second", metavar="RELEASE")
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
@with_packs
def command(first: str, second: str, script: Path | None, as_data: bool, packs: str | None) -> int:
    """Which known bugs the second release of TRL has repaired, which stay, and which it brings.

    With a script (.py, .ipynb or the .yaml of TRL's command line) only those are listed that hit it, or may. Other
    distributions are left out of account: a bug that needs a certain transformers is listed.

    \b
    Exit codes: 0 the answer was given, whatever it is; 2 the script cannot be read, or usage; 4 a release is too old.
    """
    releases = [release(text) for text in (first, second)]
    for text in releases:
        if unsupported(text):
            click.echo(f"TRL is {text}; {versions.SUPPORTED} is needed, as in 0.12.2", err=True)
            return Exit.NO_TRL
    patches = [patch for patch in loading.known(named(packs, os.environ)) if patch.severity is not Severity.DIAGNOSIS]
    try:
        calls = read(script) if script is not None else None
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    answer = _answer(releases[0], releases[1], patches, calls, script)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(Group(*_blocks(answer)))
    return Exit.FINE


def _answer(
    first: str, second: str, patches: Sequence[Patch], calls: Sequence[TrainerCall] | None, script: Path | None
) -> Answer:
    here, there = (_bugs(patches, calls, trl) for trl in (first, second))
    newest = Version(bodies().releases[-1])
    return {
        "trl_hotfix": __version__,
        "first": first,
        "second": second,
        "script": str(script) if script is not None else None,
        "repaired": [bug for bug_id, bug in here.items() if bug_id not in there],
        "stay": [bug for bug_id, bug in there.items() if bug_id in here],
        "brought": [bug for bug_id, bug in there.items() if bug_id not in here],
        "newer_than_evidence": [trl for trl in (first, second) if Version(trl) > newest],
    }


def _bugs(patches: Sequence[Patch], calls: Sequence[TrainerCall] | None, trl: str) -> dict[str, Bug]:
    """Return the bugs of a release by id, the most severe first; with a script only those that it may hit."""
    ranks = list(Severity)
    present = [patch for patch in patches if gates.targets_for(patch, trl)]
    present.sort(key=lambda patch: (ranks.index(patch.severity), patch.id))
    answers = _answers(present, calls, trl) if calls is not None else {}
    return {
        patch.id: {
            "id": patch.id,
            "title": patch.title,
            "severity": patch.severity.value,
            "on_by_default": patch.default,
            "hits": answers.get(patch.id) if calls is not None else None,
        }
        for patch in present
        if calls is None or patch.id in answers
    }


def _answers(patches: Sequence[Patch], calls: Sequence[TrainerCall], trl: str) -> dict[str, str]:
    """Return "hit" or "cannot tell" for each bug that one of the trainers hits or may hit."""
    answers: dict[str, str] = {}
    for call in calls:
        scanned = judge(call, patches, trl, other_release=True)
        for finding in scanned.unsure:
            answers.setdefault(finding.patch.id, HitAnswer.CANNOT_TELL.value)
        answers |= {finding.patch.id: HitAnswer.HIT.value for finding in scanned.hits}
    return answers


def _blocks(answer: Answer) -> list[RenderableType]:
    first, second = answer["first"], answer["second"]
    of_script = f" that hit {answer['script']}, or may" if answer["script"] is not None else ""
    titles = {
        f"TRL {second} has repaired{of_script}": answer["repaired"],
        f"TRL {first} and {second} both have{of_script}": answer["stay"],
        f"TRL {second} brings{of_script}": answer["brought"],
    }
    blocks: list[RenderableType] = []
    for title, bugs in titles.items():
        blocks.append(Text(f"{title}: {len(bugs) or 'nothing that is known'}", style="bold"))
        for bug in bugs:
            hits = f"{bug['hits']}  " if bug["hits"] is not None else ""
            off = "" if bug["on_by_default"] else "; the patch is off unless named"
            blocks.append(Padding(Text.assemble(hits, (bug["id"], "bold")), (0, 0, 0, 2)))
            blocks.append(Padding(Text(f"{bug['title']} ({bug['severity']}{off})"), (0, 0, 0, 6)))
    blocks += [
        Text(f"TRL {trl} is newer than every release that has been looked at.") for trl in answer["newer_than_evidence"]
    ]
    blocks.append(Text("trl_hotfix repairs each of these in the release that has it."))
    return blocks
