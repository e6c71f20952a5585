"""Explain a known bug that has no repair here, and how a bug is hit."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from ... import __version__
from ...matching import gates
from ...model import Bug, KnownBug
from ...reporting.sentences import fixed_in_layers, links, no_repair, where_fixed
from ...reporting.table import facts
from .answer import Answer
from .screen import must_train_again, section, whose


def known_answer(bug: KnownBug, installed: str | None) -> Answer:
    """Return the answer for a bug without a patch: what belongs to a patch is null or empty."""
    here = installed is not None and gates.has_bug(installed, bug)
    unmet = [need for need in gates.requirements(bug) if not need.met] if here else []
    because = f"TRL {installed} {'has' if here else 'does not have'} this bug ({bug.trl})"
    if installed is None:
        because = "TRL is not installed here"
    because += "".join(map(_lacks, unmet))
    return {
        "trl_hotfix": __version__,
        "id": bug.id,
        "revision": None,
        "title": bug.title,
        "severity": bug.severity.value,
        "harm": bug.harm.value if bug.harm is not None else None,
        "trl": bug.trl,
        "requires": dict(bug.requires),
        "review_by": bug.review_by.isoformat() if bug.review_by is not None else None,
        "layer": bug.layer,
        "fixed_in": bug.upstream.fixed_in,
        "fixed_in_layers": fixed_in_layers(bug),
        "links": links(bug.upstream),
        "why": bug.why,
        "when": ways_into(bug),
        "how": None,
        "not_repaired": None,
        "retrain": bug.retrain,
        "notes": "",
        "options": {},
        "targets": [],
        "proven_on": [],
        "proofs": [],
        "parity": [],
        "turn_off": [],
        "installed": installed,
        "state": "known",
        "reason": "no-repair",
        "because": because,
        "trail": [],
        "differences": {},
    }


def _lacks(need: gates.Requirement) -> str:
    here = f"here is {need.installed}" if need.installed is not None else "it is not installed here"
    return f"; it needs {need.distribution} {need.specifiers}, and {here}"


def ways_into(bug: Bug) -> list[str]:
    """Return a line for each way into the bug: the trainers, the conditions on their arguments, and what else."""
    lines = []
    for hit in bug.hits:
        trainers = "any trainer" if "*" in hit.trainers else ", ".join(hit.trainers)
        conditions = [f"{name}: {_in_words(condition)}" for name, condition in hit.when.items()]
        of_release = [f"TRL {hit.trl}"] if hit.trl is not None else []
        depends = [f"if {hit.depends}"] if hit.depends is not None else []
        lines.append("; ".join([trainers, *of_release, *conditions, *depends]))
    return lines


def _in_words(condition: object) -> str:
    if isinstance(condition, list):
        return " or ".join(map(_in_words, condition))
    return str(condition).lower() if isinstance(condition, bool) or condition is None else str(condition)


def known_view(answer: Answer) -> Group:
    """Return the answer as text."""
    rows = [
        ("severity", answer["severity"]),
        *whose(answer),
        *(("upstream", link) for link in answer["links"]),
        *(("hits", line) for line in answer["when"]),
    ]
    return Group(
        Text(answer["id"], style="bold"),
        Text(answer["title"]),
        *section("What you see, and why", answer["why"]),
        *must_train_again(answer),
        Text(""),
        facts(rows),
        *section(f"Here: {no_repair(where_fixed(answer['fixed_in'], answer['fixed_in_layers']))}", answer["because"]),
    )
