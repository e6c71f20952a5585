"""The forms in which ``scan`` prints its answer: for a reader, as JSON, as SARIF, and as annotations on GitHub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import SHOWN, plain, printable
from ..model import Bug as AnyBug
from ..reporting.lines import folded, say, width
from ..reporting.sentences import no_repair, severity_and_harm, where_fixed
from ..reporting.table import block, bug_block, show
from .annotations import annotate, annotate_ignores
from .common import say_json
from .gate import level_of
from .sarif import log, result, suppressed

if TYPE_CHECKING:
    from .scan_answer import Answer, Bug, File, NotUsed, Trainer


def as_text(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print a block for each trainer and for each bug that it hits or may hit."""
    for file in answer["files"]:
        name = plain(file["file"])
        if file["error"] is not None:
            say(file["error"], err=True)
        elif not file["trainers"] and not file["uncertain"]:
            say(f"{name}: no trainer of TRL is made in it")
        for trainer in file["trainers"]:
            show(Group(*_blocks(name, answer["trl"], trainer)))
        for unseen in file["uncertain"]:
            say(f"{name}, {unseen['position']}: uncertain: {unseen['reason']}")
        for given in file["not_used"]:
            say(_not_used(given))
    if answer["scanned"] > len(answer["files"]):
        others = answer["scanned"] - len(answer["files"])
        say(f"{others} more file{'s' if others > 1 else ''} make{'' if others > 1 else 's'} no trainer of TRL.")
    for problem in answer["ignores"]:
        say(problem["text"])


def _blocks(file: str, trl: str, trainer: Trainer) -> Iterator[RenderableType]:
    called, name = trainer["called"], trainer["trainer"]
    title = name if called in (name, name.removesuffix("Trainer")) else f"{called} ({name})"
    yield block(f"{file}, {trainer['position']}: {title} on TRL {trl}", 0, style="bold")
    for bug in trainer["hits"]:
        yield from _block(trainer, bug, Text("hit", style="bold red"), bug["because"])
    for bug in trainer["cannot_tell"]:
        yield from _block(trainer, bug, Text("cannot tell", style="yellow"), [*bug["unknown"], *bug["because"]])
    if trainer["ask"] is not None:
        yield block("This would answer more:", 2)
        yield _command(trainer["ask"])
    for accepted in trainer["accepted"]:
        why = f"{accepted['reason']} ({accepted['answer']}; {accepted['accepted_by']})"
        symptom = f"{accepted['symptom']} ({accepted['severity']})"
        yield from bug_block(Text("accepted", style="dim"), accepted["id"], symptom, why)
    hits, unsure, accepted_too = len(trainer["hits"]), len(trainer["cannot_tell"]), len(trainer["accepted"])
    known = trainer["rest"] + hits + unsure + accepted_too
    accepts = f"{accepted_too} accepted, " if accepted_too else ""
    yield block(
        f"{hits} hit, {accepts}{unsure} unknown; {trainer['rest']} of the {known} known bugs it does not hit.", 0
    )
    yield Text()


def _command(command: str) -> Text:
    """Return a command that can be copied, also where it is folded."""
    # A backslash within quotes would be a part of the argument.
    lines = [f"    {printable(command, SHOWN)}"] if "'" in command else folded(command, width() - 2, 4, 2)
    return Text(" \\\n".join(lines), no_wrap=True, overflow="ignore")


def _block(trainer: Trainer, bug: Bug, answer: Text, reasons: Sequence[str]) -> Iterator[RenderableType]:
    notes = {"if named": "; the patch is off unless named", "none": f"; {_no_repair(bug)}"}
    kind = severity_and_harm(bug["severity"], bug["harm"])
    off = "; this run repairs it" if bug["run_repairs"] else notes.get(bug["repair"], "")
    because = "; ".join(reasons) or "whatever the arguments"
    # The head has the line of the trainer, and a reason that of its value.
    named = [place for place in bug["positions"] if place != trainer["position"] and f"({place})" not in because]
    places = f"{', '.join(named)}: " if named else ""
    yield from bug_block(
        answer,
        bug["id"],
        f"{bug['symptom']} ({kind}{off})",
        f"{places}{because}",
    )


def _no_repair(bug: Bug) -> str:
    return no_repair(where_fixed(bug["fixed_in"], bug["fixed_in_layers"]))


def _not_used(given: NotUsed) -> str:
    return f"not used: {given['words']}: {given['reason']}"


def as_json(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print the answer as it is."""
    say_json(answer)


def as_annotations(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print an annotation for each hit, and one notice for what a trainer may hit."""
    for file in answer["files"]:
        name = file["file"]
        if file["error"] is not None:
            annotate("warning", name, 1, "cannot be scanned", file["error"])
        for unseen in file["uncertain"]:
            annotate("warning", name, unseen["line"], "uncertain", unseen["reason"])
        for given in file["not_used"]:
            annotate("error", name, 1, "an argument is not used", _not_used(given))
        for trainer in file["trainers"]:
            for bug in trainer["hits"]:
                _annotate_hit(bug, name, answer["trl"])
            if trainer["cannot_tell"]:
                ids = ", ".join(bug["id"] for bug in trainer["cannot_tell"])
                ask = f". This would answer more: {trainer['ask']}" if trainer["ask"] is not None else ""
                message = f"{trainer['trainer']} may hit {ids}{ask}"
                title = f"{len(trainer['cannot_tell'])} known bugs of TRL {answer['trl']} may hit"
                annotate("notice", name, trainer["line"], title, message)
    annotate_ignores(answer["ignores"], answer["files"][0]["file"] if answer["files"] else "")


def _annotate_hit(bug: Bug, file: str, trl: str) -> None:
    without = f" It is {_no_repair(bug)}." if bug["repair"] == "none" else ""
    repaired = " This run repairs it." if bug["run_repairs"] else ""
    because = "; ".join(bug["because"])
    message = f"{bug['symptom']} ({because}).{without}{repaired} trl-hotfix explain {bug['id']}"
    level = "notice" if bug["run_repairs"] else level_of(bug["severity"])
    annotate(level, file, bug["lines"][0], f"{bug['id']} ({bug['severity']}) on TRL {trl}", message)


def as_sarif(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print SARIF 2.1.0, for code scanning: a rule for each bug, a result for each that a trainer hits or may hit."""
    say_json(sarif(answer, patches))


def sarif(answer: Answer, patches: Sequence[AnyBug]) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log. A bug that we cannot tell about, or that the run repairs, is a note."""
    results = [made for file in answer["files"] for made in _results(file, answer["trl"])]
    errors = [file["error"] for file in answer["files"] if file["error"] is not None]
    uncertain = [
        f"{file['file']}, {unseen['position']}: {unseen['reason']}"
        for file in answer["files"]
        for unseen in file["uncertain"]
    ]
    not_used = [_not_used(given) for file in answer["files"] for given in file["not_used"]]
    return log(patches, results, [*errors, *uncertain, *not_used], answer["ignores"])


def _results(file: File, trl: str) -> Iterator[dict[str, Any]]:
    name = file["file"]
    for trainer in file["trainers"]:
        for bug in trainer["hits"]:
            yield _result(name, trainer, bug, trl, is_hit=True)
        for bug in trainer["cannot_tell"]:
            yield _result(name, trainer, bug, trl, is_hit=False)
        for accepted in trainer["accepted"]:
            made = _result(name, trainer, accepted, trl, is_hit=accepted["answer"] == "hit")
            yield suppressed(made, accepted["reason"], accepted["accepted_by"], plain(name))


def _result(file: str, trainer: Trainer, bug: Bug, trl: str, *, is_hit: bool) -> dict[str, Any]:
    reasons = "; ".join(bug["because"] if is_hit else [*bug["unknown"], *bug["because"]])
    text = f"{trainer['trainer']} {'hits' if is_hit else 'may hit'} a bug of TRL {trl}: {bug['symptom']}. {reasons}"
    level = level_of(bug["severity"]) if is_hit and not bug["run_repairs"] else "note"
    return result(bug["id"], level, text, file, bug["lines"])


FORMATS: Mapping[str, Callable[[Answer, Sequence[AnyBug]], None]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_annotations,
}
"""The forms by their names."""
