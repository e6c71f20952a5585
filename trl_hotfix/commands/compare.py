"""``compare`` shows which known bugs an upgrade of TRL repairs, which stay, and which it brings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from .. import __version__
from ..errors import ScriptError
from ..matching import config_defaults, gates, versions
from ..matching.fingerprints import bodies, unproven
from ..matching.hits import Answer as HitAnswer
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import fixed_in_layers, repair_of
from ..reporting.table import show
from ..scanning.default_changes import default_changes
from ..scanning.found import TrainerCall
from ..scanning.hits import judge
from ..scanning.scripts import read
from .common import (
    Exit,
    known_bugs,
    release,
    told_versions,
    unsupported,
    warn_of_unproven,
    with_packs,
    with_versions,
)
from .compare_answer import Answer, Bug, TrainerDefaults
from .compare_screen import view


@click.command("compare")
@click.argument("first", metavar="RELEASE")
@click.argument("second", metavar="RELEASE")
@click.argument("script", required=False, type=click.Path(path_type=Path))
@with_versions
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
@with_packs
def command(
    first: str, second: str, script: Path | None, versions_told: tuple[str, ...], as_data: bool, packs: str | None
) -> int:
    """Which known bugs the second release of TRL has repaired, which stay, and which it brings.

    With a script (.py, .ipynb or the .yaml of TRL's command line) it lists only those that hit it, or may, and the
    defaults of its trainers' configs that change. It lists a bug that needs a certain transformers, unless --with gives
    another one.

    Exit codes: 0 the answer was given, whatever it is; 2 the script cannot be read, or usage; 4 a release is too old.
    """
    releases = [release(text) for text in (first, second)]
    for text in releases:
        if unsupported(text):
            click.echo(f"TRL is {text}; {versions.SUPPORTED} is needed, as in 0.12.2", err=True)
            return Exit.NO_TRL
    told = told_versions(versions_told)
    bugs = [bug for bug in known_bugs(packs) if bug.severity is not Severity.DIAGNOSIS and not _excluded(bug, told)]
    try:
        calls = read(script).calls if script is not None else None
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    answer = _answer(releases[0], releases[1], bugs, calls, script, told)
    warn_of_unproven(*releases)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(view(answer))
    return Exit.FINE


def _excluded(bug: AnyBug, told: Mapping[str, str]) -> bool:
    """Return whether the bug is not there with a version that was given."""
    return any(not need.met for need in gates.requirements(bug, told.get) if need.installed is not None)


def _answer(
    first: str,
    second: str,
    patches: Sequence[AnyBug],
    calls: Sequence[TrainerCall] | None,
    script: Path | None,
    told: Mapping[str, str],
) -> Answer:
    here, there = (_bugs(patches, calls, trl, told) for trl in (first, second))
    return {
        "trl_hotfix": __version__,
        "first": first,
        "second": second,
        "script": str(script) if script is not None else None,
        "versions": dict(told),
        "repaired": [bug for bug_id, bug in here.items() if bug_id not in there],
        "stay": [bug for bug_id, bug in there.items() if bug_id in here],
        "brought": [bug for bug_id, bug in there.items() if bug_id not in here],
        "newer_than_evidence": [trl for trl in (first, second) if unproven(trl) is not None],
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


def _bugs(
    patches: Sequence[AnyBug], calls: Sequence[TrainerCall] | None, trl: str, told: Mapping[str, str]
) -> dict[str, Bug]:
    """Return the bugs of a release by id, the most severe first; with a script only those that it may hit."""
    ranks = list(Severity)
    present = [patch for patch in patches if gates.has_bug(trl, patch)]
    present.sort(key=lambda patch: (ranks.index(patch.severity), patch.id))
    answers = _answers(present, calls, trl, told) if calls is not None else {}
    return {
        patch.id: {
            "id": patch.id,
            "title": patch.title,
            "severity": patch.severity.value,
            "on_by_default": repair_of(patch) == "by default",
            "repair": repair_of(patch),
            "layer": patch.layer,
            "fixed_in": patch.upstream.fixed_in,
            "fixed_in_layers": fixed_in_layers(patch),
            "hits": answers.get(patch.id) if calls is not None else None,
        }
        for patch in present
        if calls is None or patch.id in answers
    }


def _answers(
    patches: Sequence[AnyBug], calls: Sequence[TrainerCall], trl: str, told: Mapping[str, str]
) -> dict[str, str]:
    """Return "hit" or "cannot tell" for each bug that one of the trainers hits or may hit."""
    answers: dict[str, str] = {}
    for call in calls:
        scanned = judge(call, patches, trl, other_release=True, told=told)
        for finding in scanned.unsure:
            answers.setdefault(finding.patch.id, HitAnswer.CANNOT_TELL.value)
        answers |= {finding.patch.id: HitAnswer.HIT.value for finding in scanned.hits}
    return answers
