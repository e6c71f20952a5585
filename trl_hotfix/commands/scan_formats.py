"""The forms in which ``scan`` prints its answer: for a reader, as JSON, as SARIF, and as annotations on GitHub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from .. import __version__
from ..errors import plain
from ..model import Bug as AnyBug
from ..model import Patch, Severity
from ..reporting.lines import say
from ..reporting.sentences import no_repair
from ..reporting.table import block, bug_block, show

if TYPE_CHECKING:
    from .scan_answer import Answer, Bug, File, Trainer

PROJECT = "https://github.com/huggingface/trl"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LOGGED_ONLY = (Severity.WRONG_METRIC, Severity.WASTED_COMPUTE, Severity.DIAGNOSIS)


def as_text(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print a block for each trainer and for each bug that it hits or may hit."""
    for file in answer["files"]:
        name = plain(file["file"])
        if file["error"] is not None:
            say(file["error"], err=True)
        elif not file["trainers"]:
            say(f"{name}: no trainer of TRL is made in it")
        for trainer in file["trainers"]:
            show(Group(*_blocks(name, answer["trl"], trainer)))
    if not answer["scanned"]:
        say("There is nothing to scan: a folder stands for the scripts (.py) and notebooks (.ipynb) in it.")
    if answer["scanned"] > len(answer["files"]):
        others = answer["scanned"] - len(answer["files"])
        say(f"{others} more file{'s' if others > 1 else ''} make{'' if others > 1 else 's'} no trainer of TRL.")


def _blocks(file: str, trl: str, trainer: Trainer) -> Iterator[RenderableType]:
    called, name = trainer["called"], trainer["trainer"]
    title = name if called in (name, name.removesuffix("Trainer")) else f"{called} ({name})"
    yield block(f"{file}, {trainer['position']}: {title} on TRL {trl}", 0, style="bold")
    for bug in trainer["hits"]:
        yield from _block(bug, Text("hit", style="bold red"), bug["because"])
    for bug in trainer["cannot_tell"]:
        yield from _block(bug, Text("cannot tell", style="yellow"), [*bug["unknown"], *bug["because"]])
    hits, unsure = len(trainer["hits"]), len(trainer["cannot_tell"])
    known = trainer["rest"] + hits + unsure
    yield block(f"{hits} hit, {unsure} cannot be told; {trainer['rest']} of the {known} known bugs it does not hit.", 0)
    yield Text()


def _block(bug: Bug, answer: Text, reasons: Sequence[str]) -> Iterator[RenderableType]:
    notes = {"if named": "; the patch is off unless named", "none": f"; {no_repair(bug['fixed_in'])}"}
    off = notes.get(bug["repair"], "")
    positions = ", ".join(dict.fromkeys(bug["positions"]))
    because = f"{positions}: {'; '.join(reasons) or 'whatever the arguments'}"
    yield from bug_block(answer, bug["id"], f"{bug['symptom']} ({bug['severity']}{off})", because)


def as_json(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print the answer as it is."""
    click.echo(json.dumps(answer, indent=2))


def as_annotations(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print workflow commands of GitHub Actions: an error for each hit, and one notice for what a trainer may hit."""
    for file in answer["files"]:
        name = file["file"]
        if file["error"] is not None:
            click.echo(_annotation("warning", name, 1, "cannot be scanned", file["error"]))
        for trainer in file["trainers"]:
            for bug in trainer["hits"]:
                without = f" It is {no_repair(bug['fixed_in'])}." if bug["repair"] == "none" else ""
                message = f"{bug['symptom']} ({'; '.join(bug['because'])}).{without} trl-hotfix explain {bug['id']}"
                line = bug["lines"][0]
                click.echo(_annotation("error", name, line, f"{bug['id']} on TRL {answer['trl']}", message))
            if trainer["cannot_tell"]:
                ids = ", ".join(bug["id"] for bug in trainer["cannot_tell"])
                title = f"{len(trainer['cannot_tell'])} known bugs of TRL {answer['trl']} cannot be told"
                click.echo(_annotation("notice", name, trainer["line"], title, f"{trainer['trainer']} may hit {ids}"))


def _annotation(level: str, file: str, line: int, title: str, message: str) -> str:
    properties = {"file": PurePath(file).as_posix(), "line": str(line), "title": title}
    written = ",".join(f"{name}={_escaped(value, in_property=True)}" for name, value in properties.items())
    return f"::{level} {written}::{_escaped(message)}"


def _escaped(text: str, *, in_property: bool = False) -> str:
    for character, code in {"%": "%25", "\r": "%0D", "\n": "%0A"}.items():
        text = text.replace(character, code)
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text


def as_sarif(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print SARIF 2.1.0, for code scanning: a rule for each bug, a result for each that a trainer hits or may hit."""
    click.echo(json.dumps(sarif(answer, patches), indent=2))


def sarif(answer: Answer, patches: Sequence[AnyBug]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log. What cannot be told is a note."""
    rules = {patch.id: _rule(patch) for patch in patches}
    results = [result for file in answer["files"] for result in _results(file, answer["trl"], list(rules))]
    errors = [file["error"] for file in answer["files"] if file["error"] is not None]
    notifications = [{"level": "warning", "message": {"text": error}} for error in errors]
    driver = {"name": "trl_hotfix", "semanticVersion": __version__, "rules": list(rules.values())}
    invocation = {"executionSuccessful": True, "toolExecutionNotifications": notifications}
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": results,
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(patch: AnyBug) -> dict[str, Any]:
    repair = patch.how if isinstance(patch, Patch) else f"trl_hotfix: {no_repair(patch.upstream.fixed_in)}"
    level = "warning" if patch.severity in _LOGGED_ONLY else "error"
    rule = {
        "id": patch.id,
        "shortDescription": {"text": patch.title},
        "fullDescription": {"text": patch.why},
        "help": {"text": f"{repair}\n\ntrl-hotfix explain {patch.id}"},
        "defaultConfiguration": {"level": level},
        "properties": {"tags": [patch.severity.value]},
    }
    thread = patch.upstream.issue or patch.upstream.fix
    number = thread[0] if isinstance(thread, tuple) else thread
    return {**rule, "helpUri": f"{PROJECT}/issues/{number}"} if number is not None else rule


def _results(file: File, trl: str, rules: Sequence[str]) -> Iterator[dict[str, Any]]:
    for trainer in file["trainers"]:
        for key, level in (("hits", None), ("cannot_tell", "note")):
            bugs: Sequence[Bug] = trainer[key]  # type: ignore[literal-required]
            for bug in bugs:
                yield _result(file["file"], trainer, bug, level, trl, rules)


def _result(file: str, trainer: Trainer, bug: Bug, level: str | None, trl: str, rules: Sequence[str]) -> dict[str, Any]:
    reasons = "; ".join(bug["because"] if level is None else [*bug["unknown"], *bug["because"]])
    answer = "hits" if level is None else "may hit"
    artifact = {"uri": PurePath(file).as_posix()}
    locations = [
        {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}} for line in bug["lines"]
    ]
    result: dict[str, Any] = {
        "ruleId": bug["id"],
        "ruleIndex": rules.index(bug["id"]),
        "message": {"text": f"{trainer['trainer']} {answer} a bug of TRL {trl}: {bug['symptom']}. {reasons}"},
        "locations": locations[:1],
        "relatedLocations": locations[1:],
    }
    return {**result, "level": level} if level is not None else result


FORMATS: Mapping[str, Callable[[Answer, Sequence[AnyBug]], None]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_annotations,
}
"""The forms by their names."""
