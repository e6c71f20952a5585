"""The forms in which ``audit`` prints its answer: for a reader, as JSON, as SARIF, and as annotations on GitHub."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import LONG, plain, printable
from ..model import Bug as AnyBug
from ..reporting.lines import width
from ..reporting.sentences import no_repair, severity_and_harm, where_fixed
from ..reporting.table import NARROW, block, bug_block, show
from .annotations import annotate, annotate_ignores
from .audit_answer import CANNOT_TELL, Accepted, Answer, Bug
from .common import say_json
from .gate import level_of
from .sarif import log, result, suppressed


def as_text(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print a table for pins, and a block for each bug of a run."""
    show(Group(*_blocks(answer)))


def _blocks(answer: Answer) -> Iterator[RenderableType]:
    narrowed = answer["narrowed"]
    what = ", ".join(narrowed["trainers"]) if narrowed is not None else answer["trainer"] or "pins"
    others = ", ".join(f"{name} {version}" for name, version in answer["versions"].items() if name != "trl")
    title = f"{plain(answer['path'])}: {what} on TRL {answer['trl']}{f' ({others})' if others else ''}"
    yield block(title, 0, style="bold")
    if answer["kind"] == "pins" and answer["bugs"]:
        yield from [_table(answer["bugs"])] if width() >= NARROW else map(_narrow, answer["bugs"])
    for bug in answer["bugs"] if answer["kind"] == "run" else ():
        witnessed = ["found out by the run itself"] if bug["source"] == "record" else []
        reasons = "; ".join([_of_record(bug), *witnessed, *bug["unknown"], *bug["because"]])
        yield from bug_block(_answer(bug), bug["id"], f"{bug['symptom']} ({_severity(bug)})", reasons)
        if bug["retrain"] is not None and bug["repaired"] != "repaired":
            yield block(f"train again? {bug['retrain']}", 6)
    for accepted in answer["accepted"]:
        yield block(f"accepted: {accepted['id']}: {accepted['reason']} ({accepted['accepted_by']})", 0, hanging=2)
    yield block(_last_line(answer), 0)
    for place in narrowed["uncertain"] if narrowed is not None else ():
        yield block(f"uncertain: {place}", 0, hanging=2)
    for problem in answer["ignores"]:
        yield block(problem["text"], 0, hanging=2)


def _answer(bug: Bug) -> Text:
    return Text(bug["answer"], style="bold red" if bug["answer"] != CANNOT_TELL else "yellow")


def _table(bugs: Sequence[Bug]) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    # An id must be easy to copy, so it is never folded.
    view.add_column("bug", overflow="fold", width=max(len(bug["id"]) for bug in bugs))
    for name in ("severity", "bug of", "fixed in", "repaired here", "answer"):
        view.add_column(name, overflow="fold")
    for bug in bugs:
        reasons = Text(f": {printable('; '.join(bug['unknown']), 2 * LONG)}" if bug["unknown"] else "")
        view.add_row(
            Text(bug["id"], style="bold"),
            Text(_severity(bug)),
            Text(bug["layer"] or "TRL"),
            Text(_fixed(bug) or "no release"),
            Text(_repaired_here(bug)),
            Text.assemble(_answer(bug), reasons),
        )
    return view


def _narrow(bug: Bug) -> RenderableType:
    """Return the row of a bug for a narrow terminal, with the id on a line of its own."""
    head = Padding(Text(bug["id"], style="bold"), (0, 0, 0, 2))
    fixed = f"a bug of {bug['layer'] or 'TRL'}; fixed in {_fixed(bug) or 'no release'}"
    row = f"{_severity(bug)}; {fixed}; repaired here: {_repaired_here(bug)}"
    reasons = f": {'; '.join(bug['unknown'])}" if bug["unknown"] else ""
    return Group(head, block(f"{row}; {bug['answer']}{reasons}", 6))


def _severity(bug: Bug) -> str:
    return severity_and_harm(bug["severity"], bug["harm"])


def _fixed(bug: Bug) -> str | None:
    return where_fixed(bug["fixed_in"], bug["fixed_in_layers"])


def _repaired_here(bug: Bug) -> str:
    if bug["run_repairs"] is not None:
        return "by this run" if bug["run_repairs"] else "not by this run"
    return "no" if bug["repaired"] == "none" else bug["repaired"]


def _of_record(bug: Bug) -> str:
    repaired = bug["repaired"]
    if repaired == "none":
        return no_repair(_fixed(bug))
    words = {"unknown": "the run has no record of trl_hotfix", "no": "its record does not have the patch"}
    return words.get(repaired, f"its record has the patch: {printable(repaired, LONG)}")


def _last_line(answer: Answer) -> str:
    bugs = answer["bugs"]
    certain = sum(bug["answer"] != CANNOT_TELL for bug in bugs)
    unsure = len(bugs) - certain
    if answer["kind"] == "run":
        repaired = sum(bug["repaired"] == "repaired" for bug in bugs)
        return f"This run: hit {certain}, repaired {repaired} by its record; cannot tell {unsure}."
    by_default = sum(bug["repaired"] == "by default" for bug in bugs)
    without = sum(bug["repaired"] == "none" for bug in bugs)
    repairs = f"trl_hotfix repairs {by_default} by default, and has no repair for {without}."
    narrowed = answer["narrowed"]
    if narrowed is None:
        which = "Which of them hit a script: trl-hotfix scan"
        return f"{certain} known bugs are in these versions, {unsure} may be; {repairs} {which}"
    scripts = len(narrowed["scripts"])
    of = f"{scripts} script{'s' if scripts > 1 else ''}" if scripts else "these trainers"
    rest = f"{narrowed['left_out']} more of these versions do not; --all shows them."
    return f"{certain} known bugs hit {of}, {unsure} may; {repairs} {rest}"


def as_json(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print the answer as it is."""
    say_json(answer)


def as_annotations(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print an annotation at the pin of TRL for each bug, and one notice for all that may be there."""
    for bug in answer["bugs"]:
        if bug["answer"] != CANNOT_TELL:
            title = f"{bug['id']} ({bug['severity']}) in TRL {answer['trl']}"
            annotate(_level(bug, "notice"), answer["path"], answer["line"], title, _message(answer, bug))
    unsure = [bug["id"] for bug in answer["bugs"] if bug["answer"] == CANNOT_TELL]
    if unsure:
        title = f"{len(unsure)} known bugs of TRL {answer['trl']} may be there"
        annotate("notice", answer["path"], answer["line"], title, ", ".join(unsure))
    annotate_ignores(answer["ignores"], answer["path"])


def as_sarif(answer: Answer, patches: Sequence[AnyBug]) -> None:
    """Print SARIF 2.1.0: a rule and a result for each bug, at the pin of TRL."""
    accepted = [
        suppressed(_result(answer, bug), bug["reason"], bug["accepted_by"], answer["path"])
        for bug in answer["accepted"]
    ]
    results = [*(_result(answer, bug) for bug in answer["bugs"]), *accepted]
    named = {made["ruleId"] for made in results}
    rules = [patch for patch in patches if patch.id in named]
    # A record may name a bug of a pack that is not at hand, which has no rule.
    results = [made for made in results if made["ruleId"] in {rule.id for rule in rules}]
    uncertain = answer["narrowed"]["uncertain"] if answer["narrowed"] is not None else []
    say_json(log(rules, results, uncertain, answer["ignores"]))


def _result(answer: Answer, bug: Bug | Accepted) -> dict[str, Any]:
    level = _level(bug, "note") if bug["answer"] != CANNOT_TELL else "note"
    return result(bug["id"], level, _message(answer, bug), answer["path"], [answer["line"]])


def _level(bug: Bug, of_repaired: str) -> str:
    """Return the level of a bug. SARIF and GitHub have another word each for what is repaired."""
    return of_repaired if bug["run_repairs"] or bug["repaired"] == "repaired" else level_of(bug["severity"])


def _message(answer: Answer, bug: Bug) -> str:
    fixed = _fixed(bug)
    fix = f"fixed in {fixed}" if fixed else "no release has the fix"
    reasons = "".join(f" {reason};" for reason in (*bug["unknown"], *bug["because"]))
    return f"{bug['symptom']}.{reasons} {fix}; repaired here: {_repaired_here(bug)}. trl-hotfix explain {bug['id']}"


FORMATS: Mapping[str, Callable[[Answer, Sequence[AnyBug]], None]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_annotations,
}
"""The forms by their names."""
