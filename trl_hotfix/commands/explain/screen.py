"""Show the answer of ``explain`` in a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ...catalogue import on_record
from ...matching.fingerprints import bodies_for
from ...model import Harm, Patch, Target
from ...reporting.lines import width
from ...reporting.sentences import harm_in_words
from ...reporting.table import NARROW, block, facts
from .answer import Answer, TargetAnswer


def answer_view(answer: Answer, patch: Patch) -> Group:
    """Return the answer as text and tables."""
    rows = [
        ("severity", answer["severity"]),
        *whose(answer),
        *(("upstream", link) for link in answer["links"]),
        *(("target", _target(target)) for target in answer["targets"]),
        ("evidence", on_record.in_words(patch)),
        *(("proof", line) for line in _proofs(answer)),
    ]
    for name, option in answer["options"].items():
        for choice, meaning in option["choices"].items():
            default = " (default)" if choice == option["default"] else ""
            rows.append(("option", f"{name}={choice}{default}: {meaning}"))
    rows += [("turn off", switch) for switch in answer["turn_off"]]
    parts: list[Any] = [
        Text(f"{answer['id']} (revision {answer['revision']})", style="bold"),
        Text(answer["title"]),
        *section("What you see, and why", answer["why"]),
        *must_train_again(answer),
        *section("What the patch does", answer["how"] or ""),
        *(section("What is not repaired", answer["not_repaired"]) if answer["not_repaired"] else []),
        *section("More", answer["notes"]),
        Text(""),
        facts(rows),
        *section(f"Here: {answer['state']} ({answer['reason']})", answer["because"]),
        _gate_by_gate(answer),
    ]
    for target, difference in answer["differences"].items():
        parts += [Text(f"what has changed in {target}", style="bold"), Syntax(difference, "diff", word_wrap=True)]
    if any(step["passed"] is False and "on record for no release" in step["found"] for step in answer["trail"]):
        parts.append(Text(_hint(patch)))
    return Group(*parts)


def must_train_again(answer: Answer) -> list[Any]:
    """Return the section on models that were trained with the bug, if the entry has one."""
    harm = harm_in_words(Harm(answer["harm"])) if answer["harm"] is not None else None
    return section("Must I train again?", f"{answer['retrain']} ({harm})") if harm is not None else []


def whose(answer: Answer) -> list[tuple[str, str]]:
    """Return a row for TRL, and for each other distribution that the bug needs: where it begins and ends."""
    open_end = f"still in the newest release we checked; we check again by {answer['review_by']}"
    of_trl = f"fixed in {answer['fixed_in']}" if answer["fixed_in"] else "" if answer["fixed_in_layers"] else open_end
    rows = [("bug of", answer["layer"] or "TRL"), ("TRL", "; ".join(filter(None, [answer["trl"], of_trl])))]
    for name, versions in answer["requires"].items():
        fixed = answer["fixed_in_layers"].get(name)
        rows.append(("requires", f"{name} {versions}" + (f"; fixed in {fixed}" if fixed else "")))
    return rows


def _gate_by_gate(answer: Answer) -> RenderableType:
    """Return a table. In a narrow terminal it is a list, since a table would break the names of methods."""
    marks = {True: ("yes", "green"), False: ("no", "bold red"), None: ("?", "yellow")}
    if width() < NARROW:
        lines = [
            (f"{marks[step['passed']][0]}: {step['gate']}: {step['found']}", step["passed"]) for step in answer["trail"]
        ]
        return Group(Text(), *(block(text, 2, marks[passed][1], hanging=2) for text, passed in lines))
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("gate", "found", "passed"):
        view.add_column(column, overflow="fold")
    for step in answer["trail"]:
        word, colour = marks[step["passed"]]
        view.add_row(Text(step["gate"]), Text(step["found"]), Text(word, style=colour))
    return view


def _target(target: TargetAnswer) -> str:
    called = f"; called: {target['called']}" if target["called"] is not None else ""
    return f"{target['module']}: {target['attribute']} ({target['trl']}{called})"


def section(head: str, text: str) -> list[Any]:
    """Return a heading and its paragraphs."""
    paragraphs = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return [Text(""), Text(head, style="bold"), Padding(Text(paragraphs), (0, 0, 0, 2), expand=False)]


def _proofs(answer: Answer) -> list[str]:
    """Return the numbers of the first release with a proof, and those of the comparison with the fixed release."""
    lines = []
    proven = [proof for proof in answer["proofs"] if proof["verdict"] == "proven"]
    for proof in proven[:1]:
        red, green = (proof["runs"][name].get("measured") for name in ("red", "green"))
        expected = proof["runs"]["red"].get("right")
        if _is_number(red) and _is_number(green):
            right = f", {expected:.7g} is right" if _is_number(expected) else ""
            lines.append(f"trained with TRL {proof['release']}: {red:.7g} before, {green:.7g} patched{right}")
    for parity in answer["parity"][:1]:
        largest = max(parity["loss_difference"], parity["gradient_difference"])
        lines.append(
            f"patched TRL {parity['release']} is TRL {parity['fixed_release']}, losses and gradients, to {largest:.1g}"
        )
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _hint(patch: Patch) -> str:
    """Return the commands that show the changes. They download a wheel, since the package has no sources of TRL."""
    known = bodies_for(patch.id)
    releases = [
        release for target in patch.targets for release in known.releases_with(target.name, _last_buggy(patch, target))
    ]
    if not releases:
        return ""
    last = releases[-1]
    return (
        f"To see what has changed since TRL {last}: pip download --no-deps trl=={last}; "
        f"trl-hotfix explain {patch.id} --against trl-{last}-py3-none-any.whl"
    )


def _last_buggy(patch: Patch, target: Target) -> str | None:
    """Return the body with the bug that the newest of the releases on record has, or None."""
    known = bodies_for(patch.id)
    buggy = [
        body for body in known.targets.get(target.name, {}) if known.verdict(patch.id, target.name, body) == "buggy"
    ]
    return max(buggy, key=lambda body: known.releases.index(known.releases_with(target.name, body)[-1]), default=None)
