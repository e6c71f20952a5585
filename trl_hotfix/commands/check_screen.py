"""Show a reader what a check found out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from ..checking.answers import HOLDS, NOT_ASKED, VIOLATED, Answer, Relation
from ..matching.hits import Answer as HitAnswer
from ..reporting.sentences import severity_and_harm
from ..reporting.table import block, bug_block

SHOWN = 3
"""Show so many differences of a relation. The JSON has all."""


def view(answer: Answer) -> RenderableType:
    return Group(*_lines(answer))


def _lines(answer: Answer) -> Iterator[RenderableType]:
    trainer = answer["trainer"]
    if trainer is not None:
        of_trl = answer["of_trl"]
        named = trainer if trainer == of_trl else f"{trainer} ({of_trl})"
        yield block(f"{answer['place']}: {named} on TRL {answer['trl']}", 0, style="bold")
    if answer["taken"]:
        yield block(f"Taken: {'; '.join(answer['taken'])}.", 2, style="dim")
        yield block(f"Not checked: {', '.join(answer['not_checked'])}.", 2, style="dim")
    for text in answer["noted"]:
        yield block(f"Note: {text}.", 2, style="yellow")
    hits = [bug for bug in answer["bugs"] if bug["answer"] == HitAnswer.HIT.value]
    for bug in hits:
        kind = severity_and_harm(bug["severity"], bug["harm"])
        because = "; ".join(bug["because"]) or "whatever the arguments"
        yield from bug_block(Text("hit", style="bold red"), bug["id"], f"{bug['symptom']} ({kind})", because)
    unsure = [bug["id"] for bug in answer["bugs"] if bug["answer"] != HitAnswer.HIT.value]
    if unsure:
        yield block(f"cannot tell: {', '.join(unsure)}", 2, style="yellow")
    for would in answer["would_ask"]:
        asked = f"cannot be asked: {would['refused']}" if would["refused"] else f"the run = {would['setting']}"
        yield Text.assemble("  ", (f"{would['relation']:<{_WIDTH}}", "bold"), f"  {asked}")
    for _, group in groupby(answer["relations"], key=lambda each: each["relation"]):
        yield from _relation(list(group))
    if answer["error"] is not None:
        yield block(answer["error"], 0, style="bold red")
    if answer["relations"]:
        yield block(_counts(answer, len(hits)), 0)


_WIDTH = len("accumulation")


def _counts(answer: Answer, hits: int) -> str:
    training = [each["state"] for each in answer["relations"] if each["part"] == "training"]
    words = [f"{training.count(state)} {word}" for state, word in _STATES.items() if training.count(state)]
    return f"{hits} bugs hit. Training: {', '.join(words)}. {answer['runs']} runs, {answer['seconds']:.0f} s"


_STATES = {HOLDS: "relations hold", VIOLATED: "do not hold", NOT_ASKED: "cannot be asked"}


def _relation(group: Sequence[Relation]) -> Iterator[RenderableType]:
    """Give the lines of a relation: training in each setting, and below it differences of the log alone."""
    training = [each for each in group if each["part"] == "training"]
    for alike in _alike(training):
        yield from _block(alike)
    metrics = [each for each in group if each["part"] == "metrics" and each["state"] != HOLDS]
    for alike in _alike(metrics):
        yield from _block(alike)


def _alike(relations: Sequence[Relation]) -> list[list[Relation]]:
    """Return the relations in groups that have the same state, reason and cause."""
    groups: dict[tuple[object, ...], list[Relation]] = {}
    for each in relations:
        said = tuple(str(each[name]) for name in ("state", "reason", "cause", "whose", "place"))
        groups.setdefault(said, []).append(each)
    return list(groups.values())


def _block(alike: Sequence[Relation]) -> Iterator[RenderableType]:
    first = alike[0]
    state = first["state"]
    is_training = first["part"] == "training"
    colour = {HOLDS: "green", NOT_ASKED: "yellow"}.get(state, "yellow" if _is_harmless(first) else "bold red")
    settings = "; ".join(
        each["setting"] + (f" by a factor of {each['factor']:.2f}" if each["factor"] else "") for each in alike
    )
    name = first["relation"] if is_training else ""
    said = state if is_training else "what is logged does not agree"
    if state == NOT_ASKED:
        yield Text.assemble("  ", (f"{name:<{_WIDTH}}", "bold"), "  ", (state, colour), f": {first['reason']}")
        return
    yield Text.assemble("  ", (f"{name:<{_WIDTH}}", "bold"), "  ", (said, colour), f"  {settings}")
    if state == HOLDS:
        return
    indent = 4 + _WIDTH
    if first["cause"]:
        yield block(f"{first['cause']}{', repaired with TRL_HOTFIX=1' if first['repaired'] else ''}", indent)
    else:
        whose = {"yours": "your code", "TRL's": "TRL, and no cause is known"}.get(first["whose"] or "", "cause unknown")
        yield block(f"{whose}{': ' + first['place'] if first['place'] else ''}", indent)
    if first["reason"]:
        yield block(first["reason"], indent)
    if _is_harmless(first):
        names = dict.fromkeys(one["what"].partition(" of step ")[0] for each in alike for one in each["differences"])
        yield block(", ".join(names), indent, style="dim")
        return
    for difference in first["differences"][:SHOWN]:
        sides = (difference["left"], difference["right"])
        left, right = ("no number" if value is None else f"{value:.5g}" for value in sides)
        yield block(f"{difference['what']}: {left} and {right}", indent, style="dim")
    if len(first["differences"]) > SHOWN:
        yield block(f"and {len(first['differences']) - SHOWN} more", indent, style="dim")


def _is_harmless(relation: Relation) -> bool:
    is_meant = bool(relation["cause"] and relation["cause"].startswith("meant "))
    return is_meant or (relation["part"] == "metrics" and relation["whose"] != "yours")
