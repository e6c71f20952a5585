"""Show a reader what a check found out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ..checking.answers import HOLDS, NOT_ASKED, Answer, Relation
from ..matching.hits import Answer as HitAnswer
from ..reporting.sentences import severity_and_harm
from ..reporting.table import block, bug_block

SHOWN = 3
"""So many differences of a relation are shown. The JSON has all."""


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
        yield Text.assemble("  ", (would["relation"], "bold"), f"  {asked}")
    for relation in answer["relations"]:
        yield from _relation(relation)
    if answer["error"] is not None:
        yield block(answer["error"], 0, style="bold red")
    yield block(f"{len(hits)} bugs hit; {_counts(answer)}; {answer['runs']} runs, {answer['seconds']:.0f} s", 0)


def _counts(answer: Answer) -> str:
    states = [each["state"] for each in answer["relations"]]
    words = [f"{states.count(state)} {word}" for state, word in ((HOLDS, "hold"), (NOT_ASKED, "cannot be asked"))]
    return f"{len(states)} relations: " + ", ".join([*words, f"{len(states) - sum(map(states.count, (HOLDS, NOT_ASKED)))} do not hold"])


def _relation(relation: Relation) -> Iterator[RenderableType]:
    state = relation["state"]
    colour = {HOLDS: "green", NOT_ASKED: "yellow"}.get(state, "yellow" if _is_harmless(relation) else "bold red")
    name = relation["relation"] + (" (metrics)" if relation["part"] == "metrics" else "")
    setting = "" if state == NOT_ASKED else f"  {relation['setting']}"
    factor = f", by a factor of {relation['factor']:.2f}" if relation["factor"] else ""
    yield Text.assemble("  ", (name, "bold"), setting, "  ", (f"{state}{factor}", colour))
    if state == NOT_ASKED:
        yield block(relation["reason"], 6)
    if state in (HOLDS, NOT_ASKED):
        return
    if relation["cause"]:
        repaired = ", repaired with TRL_HOTFIX=1" if relation["repaired"] else ""
        yield block(f"{relation['cause']}{repaired}", 6)
    else:
        whose = {"yours": "your code", "TRL's": "TRL, and no cause is known"}.get(relation["whose"] or "", "no cause is known")
        yield block(f"{whose}{': ' + relation['place'] if relation['place'] else ''}", 6)
    if relation["reason"]:
        yield block(f"they part at {relation['reason']}", 6)
    for each in relation["differences"][:SHOWN]:
        left, right = (("no number" if value is None else f"{value:.5g}") for value in (each["left"], each["right"]))
        yield block(f"{each['what']}: {left} and {right}", 6, style="dim")
    if len(relation["differences"]) > SHOWN:
        yield block(f"and {len(relation['differences']) - SHOWN} more", 6, style="dim")


def _is_harmless(relation: Relation) -> bool:
    return bool(relation["cause"] and relation["cause"].startswith("meant ")) or (
        relation["part"] == "metrics" and relation["whose"] != "yours"
    )
