"""``audit`` tells which known bugs a set of pins brings, and which of them hit an old run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import click
from packaging.utils import canonicalize_name
from rich.console import Group, RenderableType
from rich.text import Text

from .. import __version__
from ..errors import LONG, ScriptError, plain, printable
from ..matching import gates, versions
from ..matching.hits import Answer as HitAnswer
from ..matching.hits import Finding, finding
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import no_repair, repair_of
from ..reporting.table import block, bug_block, show
from ..scanning.old_runs import OldRun, read_run
from ..scanning.pins import read_pins
from .common import Exit, known_bugs, release, unsupported, with_packs


class Bug(TypedDict):
    """A known bug. ``answer`` is "here" for pins, which have the bug, and "hit" or "cannot tell" for a run.

    ``repaired``: "by default", "if named" or, for a run, the word of its record; "no" if the record lacks the patch;
    "none" if there is no patch. ``fixed_in`` is the first release of TRL with the fix, if there is one. ``source`` of
    the answer: "pins", the "files" of a run, or "record": what the run found out when training began.
    """

    id: str
    title: str
    severity: str
    answer: str
    repaired: str
    fixed_in: str | None
    symptom: str
    because: list[str]
    unknown: list[str]
    source: str


class Answer(TypedDict):
    """What ``audit --json`` prints. ``kind`` is "pins" or "run"; ``versions`` are those that decide."""

    trl_hotfix: str
    kind: str
    path: str
    trl: str
    versions: dict[str, str]
    trainer: str | None
    has_record: bool
    bugs: list[Bug]


@click.command("audit")
@click.argument("path", metavar="FILE|FOLDER", type=click.Path(path_type=Path))
@click.option("--trl", metavar="VERSION", help="The release of TRL, if the file or the run does not tell it.")
@click.option("--json", "as_data", is_flag=True, help="The answer as JSON.")
@click.option("--fail-on", type=click.Choice(["hit", "never"]), default="hit", show_default=True)
@with_packs
def command(path: Path, trl: str | None, as_data: bool, fail_on: str, packs: str | None) -> int:
    """Which known bugs a set of pins brings, or which of them hit an old run.

    FILE has pinned versions: requirements.txt, pip freeze, uv.lock, pylock.toml, poetry.lock, environment.yml. FOLDER
    is the output folder of a run, or one of its checkpoints: its model card tells the versions, and training_args.bin
    the arguments, which is read as data, and not run. What a run was not given by its config cannot be told. What its
    record says, whose trainer was asked when training began, comes before what these files tell.

    \b
    Exit codes: 0 no bug; 1 the pins bring a bug, or the run was hit by one that its record does not repair; 2 the file
    cannot be read, or usage; 4 the release of TRL is too old.
    """
    bugs = [bug for bug in known_bugs(packs) if bug.severity is not Severity.DIAGNOSIS]
    told = release(trl) if trl is not None else None
    try:
        # `pathlib` raises for a name that is too long to be one of a file.
        is_folder = os.path.isdir(path)  # noqa: PTH112
        answer = _of_run(path, told, bugs) if is_folder else _of_pins(path, told, bugs)
    except ScriptError as error:
        raise click.ClickException(str(error)) from None
    if unsupported(answer["trl"]):
        click.echo(f"TRL is {answer['trl']}; {versions.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(Group(*_blocks(answer)))
    hit = [
        bug for bug in answer["bugs"] if bug["answer"] != HitAnswer.CANNOT_TELL.value and bug["repaired"] != "repaired"
    ]
    return Exit.DEGRADED if hit and fail_on == "hit" else Exit.FINE


def _of_pins(path: Path, told: str | None, patches: Sequence[AnyBug]) -> Answer:
    pins = read_pins(path)

    def version_of(distribution: str) -> str | None:
        return pins.get(canonicalize_name(distribution))

    trl = told or pins.get("trl")
    if trl is None:
        raise ScriptError(f"{plain(str(path))} pins no version of trl (as trl==0.16.1 does); --trl tells it")
    bugs = []
    for patch in patches:
        needs = [need for need in gates.requirements(patch, version_of) if not need.met]
        if not gates.has_bug(trl, patch) or any(need.installed is not None for need in needs):
            continue
        unknown = [f"it needs {need.distribution} {need.specifiers}, which is not pinned" for need in needs]
        answer = HitAnswer.CANNOT_TELL.value if needs else "here"
        bugs.append(_bug(patch, answer, repair_of(patch), "pins", patch.title, (), unknown))
    decisive = {"trl": trl, **{name: pins[name] for name in sorted(_required(patches)) if name in pins}}
    return _answer("pins", path, trl, decisive, None, False, bugs)


def _of_run(path: Path, told: str | None, patches: Sequence[AnyBug]) -> Answer:
    run = read_run(path)
    trl = told or run.versions.get("trl")
    if trl is None:
        raise ScriptError(f"{plain(str(path))} does not tell its release of TRL (its model card does); --trl tells it")
    if run.trainer is None:
        raise ScriptError(
            f"{plain(str(path))} does not tell its trainer: expected a training_args.bin of a trainer of TRL in it"
        )
    bugs = [bug for patch in patches if (bug := _bug_of_run(run, run.trainer, patch, trl)) is not None]
    bugs += _bugs_of_packs(run, patches)
    return _answer("run", path, trl, dict(run.versions), f"{run.trainer}Trainer", run.repaired is not None, bugs)


def _bug_of_run(run: OldRun, trainer: str, patch: AnyBug, trl: str) -> Bug | None:
    repaired = "unknown" if run.repaired is None else run.repaired.get(patch.id, "no")
    if repair_of(patch) == "none":
        repaired = "none"
    recorded = run.hits.get(patch.id)
    if recorded is not None:
        if recorded.answer == HitAnswer.NOT_HIT.value:
            return None
        symptom = recorded.symptom or patch.title
        return _bug(patch, recorded.answer, repaired, "record", symptom, recorded.because, recorded.unknown)
    found = _inferred(run, trainer, patch, trl)
    if found.answer is HitAnswer.NOT_HIT:
        return None
    return _bug(patch, found.answer.value, repaired, "files", found.symptom, found.because, found.unknown)


def _inferred(run: OldRun, trainer: str, patch: AnyBug, trl: str) -> Finding:
    """Return what the files tell that a run leaves without trl_hotfix."""

    def version_of(distribution: str) -> str | None:
        return run.versions.get(canonicalize_name(distribution))

    missing = [need for need in gates.requirements(patch, version_of) if need.installed is None]
    return finding(trainer, run.argument, patch, trl, other_release=bool(missing), version_of=version_of)


def _bugs_of_packs(run: OldRun, patches: Sequence[AnyBug]) -> Iterator[Bug]:
    """Yield the bugs of a record that the catalogue does not have: those of a pack, or of a newer trl_hotfix."""
    known = {patch.id for patch in patches}
    for hit in run.hits.values():
        is_hit = hit.answer != HitAnswer.NOT_HIT.value and hit.id not in known
        if is_hit and hit.severity is not None and hit.severity is not Severity.DIAGNOSIS:
            yield {
                "id": hit.id,
                "title": hit.symptom,
                "severity": hit.severity.value,
                "answer": hit.answer,
                "repaired": (run.repaired or {}).get(hit.id, "no"),
                "fixed_in": None,
                "symptom": hit.symptom,
                "because": list(hit.because),
                "unknown": list(hit.unknown),
                "source": "record",
            }


def _bug(
    patch: AnyBug,
    answer: str,
    repaired: str,
    source: str,
    symptom: str,
    because: Sequence[str],
    unknown: Sequence[str],
) -> Bug:
    return {
        "id": patch.id,
        "title": patch.title,
        "severity": patch.severity.value,
        "answer": answer,
        "repaired": repaired,
        "fixed_in": patch.upstream.fixed_in,
        "symptom": symptom,
        "because": list(because),
        "unknown": list(unknown),
        "source": source,
    }


def _answer(
    kind: str, path: Path, trl: str, decisive: dict[str, str], trainer: str | None, has_record: bool, bugs: list[Bug]
) -> Answer:
    ranks = [severity.value for severity in Severity]
    order = {HitAnswer.CANNOT_TELL.value: 1}
    bugs.sort(key=lambda bug: (order.get(bug["answer"], 0), ranks.index(bug["severity"]), bug["id"]))
    return {
        "trl_hotfix": __version__,
        "kind": kind,
        "path": str(path),
        "trl": trl,
        "versions": decisive,
        "trainer": trainer,
        "has_record": has_record,
        "bugs": bugs,
    }


def _required(patches: Sequence[AnyBug]) -> set[str]:
    return {canonicalize_name(name) for patch in patches for name in patch.requires}


def _blocks(answer: Answer) -> Iterator[RenderableType]:
    what = answer["trainer"] or "pins"
    others = ", ".join(f"{name} {version}" for name, version in answer["versions"].items() if name != "trl")
    title = f"{plain(answer['path'])}: {what} on TRL {answer['trl']}{f' ({others})' if others else ''}"
    yield block(title, 0, style="bold")
    for bug in answer["bugs"]:
        sure = bug["answer"] != HitAnswer.CANNOT_TELL.value
        style = "bold red" if sure else "yellow"
        witnessed = ["found out by the run itself"] if bug["source"] == "record" else []
        reasons = "; ".join([_in_words(answer["kind"], bug), *witnessed, *bug["unknown"], *bug["because"]])
        symptom = f"{bug['symptom']} ({bug['severity']})"
        yield from bug_block(Text(bug["answer"], style=style), bug["id"], symptom, reasons)
    yield block(_last_line(answer), 0)


def _in_words(kind: str, bug: Bug) -> str:
    repaired = bug["repaired"]
    if repaired == "none":
        return no_repair(bug["fixed_in"])
    if kind == "pins":
        return f"trl_hotfix repairs it {repaired}"
    words: Mapping[str, str] = {
        "unknown": "the run has no record of trl_hotfix",
        "no": "its record does not have the patch",
    }
    return words.get(repaired, f"its record has the patch: {printable(repaired, LONG)}")


def _last_line(answer: Answer) -> str:
    certain = sum(bug["answer"] != HitAnswer.CANNOT_TELL.value for bug in answer["bugs"])
    unsure = len(answer["bugs"]) - certain
    if answer["kind"] == "pins":
        by_default = sum(bug["repaired"] == "by default" for bug in answer["bugs"])
        without = sum(bug["repaired"] == "none" for bug in answer["bugs"])
        return (
            f"{certain} known bugs are in these versions, {unsure} may be; trl_hotfix repairs {by_default} by default, "
            f"and has no repair for {without}. "
            "Which of them hit a script: trl-hotfix scan"
        )
    repaired = sum(bug["repaired"] == "repaired" for bug in answer["bugs"])
    return f"{certain} known bugs hit this run, {unsure} may have; its record has {repaired} of them as repaired."
