"""``compare`` tells which known bugs an upgrade of TRL repairs, which stay, and which it brings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import click
from packaging.version import Version
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from .. import __version__
from ..errors import ScriptError, plain
from ..matching import config_defaults, gates, versions
from ..matching.fingerprints import bodies
from ..matching.hits import Answer as HitAnswer
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import no_repair, repair_of
from ..reporting.table import block, show
from ..scanning.default_changes import Change, default_changes
from ..scanning.hits import judge
from ..scanning.scripts import read
from ..scanning.trainer_calls import TrainerCall
from .common import Exit, known_bugs, release, unsupported, with_packs


class Bug(TypedDict):
    """A known bug. ``hits``: whether it hits the script on the release that has it; None without a script.

    ``repair`` of trl_hotfix: "by default", "if named" or "none"; ``fixed_in`` is the first release with TRL's own.
    """

    id: str
    title: str
    severity: str
    on_by_default: bool
    repair: str
    fixed_in: str | None
    hits: str | None


class Default(TypedDict):
    """An argument that the script leaves to TRL, or may, and its default in both releases, as source text.

    ``change`` is "default", "may be set", "gone" (the script sets it, and TRL's config does not define it any more) or
    "new". A default is null where the config does not define the argument.
    """

    name: str
    change: str
    before: str | None
    after: str | None
    position: str | None


class TrainerDefaults(TypedDict):
    """The defaults that change for one trainer of the script. ``unknown``: why they cannot be told, or null."""

    trainer: str
    position: str
    changes: list[Default]
    unknown: str | None


class Answer(TypedDict):
    """What ``compare --json`` prints. ``newer_than_evidence``: nobody has looked for the bugs of these releases.

    ``defaults`` has an entry for each trainer of the script; without a script it is null.
    """

    trl_hotfix: str
    first: str
    second: str
    script: str | None
    repaired: list[Bug]
    stay: list[Bug]
    brought: list[Bug]
    newer_than_evidence: list[str]
    defaults: list[TrainerDefaults] | None


@click.command("compare")
@click.argument("first", metavar="RELEASE")
@click.argument("second", metavar="RELEASE")
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
@with_packs
def command(first: str, second: str, script: Path | None, as_data: bool, packs: str | None) -> int:
    """Which known bugs the second release of TRL has repaired, which stay, and which it brings.

    With a script (.py, .ipynb or the .yaml of TRL's command line) only those are listed that hit it, or may, and the
    defaults of its trainers' configs that change. Other distributions are left out of account: a bug that needs a
    certain transformers is listed.

    \b
    Exit codes: 0 the answer was given, whatever it is; 2 the script cannot be read, or usage; 4 a release is too old.
    """
    releases = [release(text) for text in (first, second)]
    for text in releases:
        if unsupported(text):
            click.echo(f"TRL is {text}; {versions.SUPPORTED} is needed, as in 0.12.2", err=True)
            return Exit.NO_TRL
    bugs = [bug for bug in known_bugs(packs) if bug.severity is not Severity.DIAGNOSIS]
    try:
        calls = read(script) if script is not None else None
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    answer = _answer(releases[0], releases[1], bugs, calls, script)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(Group(*_blocks(answer)))
    return Exit.FINE


def _answer(
    first: str, second: str, patches: Sequence[AnyBug], calls: Sequence[TrainerCall] | None, script: Path | None
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
        "defaults": [_defaults(call, first, second) for call in calls] if calls is not None else None,
    }


def _defaults(call: TrainerCall, first: str, second: str) -> TrainerDefaults:
    releases = bodies().releases
    answer: TrainerDefaults = {
        "trainer": f"{call.name}Trainer",
        "position": call.position(call.line),
        "changes": [],
        "unknown": None,
    }
    of_both = []
    for trl in (first, second):
        try:
            defaults = config_defaults.defaults(trl, call.name, releases)
        except LookupError:
            return {**answer, "unknown": f"the defaults of TRL {trl} are not on record, and it is not installed here"}
        if defaults is None:
            return {**answer, "unknown": f"TRL {trl} has no {call.name}Config"}
        of_both.append(defaults)
    for change in default_changes(call, *of_both):
        position = call.position(change.line) if change.line is not None else None
        answer["changes"].append(
            {
                "name": change.name,
                "change": change.change.value,
                "before": change.before,
                "after": change.after,
                "position": position,
            }
        )
    return answer


def _bugs(patches: Sequence[AnyBug], calls: Sequence[TrainerCall] | None, trl: str) -> dict[str, Bug]:
    """Return the bugs of a release by id, the most severe first; with a script only those that it may hit."""
    ranks = list(Severity)
    present = [patch for patch in patches if gates.has_bug(trl, patch)]
    present.sort(key=lambda patch: (ranks.index(patch.severity), patch.id))
    answers = _answers(present, calls, trl) if calls is not None else {}
    return {
        patch.id: {
            "id": patch.id,
            "title": patch.title,
            "severity": patch.severity.value,
            "on_by_default": repair_of(patch) == "by default",
            "repair": repair_of(patch),
            "fixed_in": patch.upstream.fixed_in,
            "hits": answers.get(patch.id) if calls is not None else None,
        }
        for patch in present
        if calls is None or patch.id in answers
    }


def _answers(patches: Sequence[AnyBug], calls: Sequence[TrainerCall], trl: str) -> dict[str, str]:
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
    of_script = f" that hit {plain(answer['script'])}, or may" if answer["script"] is not None else ""
    titles = {
        f"TRL {second} has repaired{of_script}": answer["repaired"],
        f"TRL {first} and {second} both have{of_script}": answer["stay"],
        f"TRL {second} brings{of_script}": answer["brought"],
    }
    blocks: list[RenderableType] = []
    for title, bugs in titles.items():
        blocks.append(block(f"{title}: {len(bugs) or 'nothing that is known'}", 0, style="bold"))
        for bug in bugs:
            hits = f"{bug['hits']}  " if bug["hits"] is not None else ""
            notes = {"if named": "; the patch is off unless named", "none": f"; {no_repair(bug['fixed_in'])}"}
            off = notes.get(bug["repair"], "")
            blocks.append(Padding(Text.assemble(hits, (bug["id"], "bold")), (0, 0, 0, 2)))
            blocks.append(block(f"{bug['title']} ({bug['severity']}{off})", 6))
    for trainer in answer["defaults"] or ():
        blocks += _blocks_of_defaults(trainer, second)
    blocks += [
        Text(f"TRL {trl} is newer than every release that has been looked at.") for trl in answer["newer_than_evidence"]
    ]
    without = sum(bug["repair"] == "none" for bugs in titles.values() for bug in bugs)
    blocks.append(
        Text(f"trl_hotfix repairs them in the release that has them{f', all but {without}' * bool(without)}.")
    )
    return blocks


def _blocks_of_defaults(trainer: TrainerDefaults, second: str) -> list[RenderableType]:
    """Return what changes for one trainer. Arguments that are new and off are many, and share a line."""
    config = f"{trainer['trainer'].removesuffix('Trainer')}Config"
    new = [change["name"] for change in trainer["changes"] if change["change"] == Change.NEW.value]
    shown = [change for change in trainer["changes"] if change["change"] != Change.NEW.value]
    title = f"Defaults of {config} that change for {trainer['trainer']}, {trainer['position']}"
    blocks: list[RenderableType] = [Text(f"{title}: {trainer['unknown'] or len(shown) or 'none'}", style="bold")]
    for change in shown:
        before, after = (change[key] if change[key] is not None else "not there" for key in ("before", "after"))
        notes = {
            Change.MAY_BE_SET.value: f" (unless the script sets it: {change['position']})",
            Change.GONE.value: f" (the script sets it: {change['position']})",
        }
        line = f"{change['name']}: {before} -> {after}{notes.get(change['change'], '')}"
        blocks.append(block(line, 2, hanging=2))
    if new:
        blocks.append(block(f"new in TRL {second}: {', '.join(new)}", 2, style="dim"))
    return blocks
