"""Whether an answer of ``scan`` fails a gate, and the severity that a bug has in every format."""

from __future__ import annotations

from collections.abc import Iterable

import click

from ..model import Bug, Severity
from .accepted import is_due
from .scan_answer import Answer

_LOGGED_ONLY = (Severity.WRONG_METRIC, Severity.WASTED_COMPUTE, Severity.DIAGNOSIS)

with_severity = click.option(
    "--severity",
    type=click.Choice([severity.value for severity in Severity]),
    metavar="LEVEL",
    help=f"Only bugs that are at least as severe, from the worst: {', '.join(level.value for level in Severity)}.",
)


def level_of(severity: str) -> str:
    """Return the level of a hit in SARIF and in an annotation, ``warning`` if the model trains as it should."""
    return "warning" if Severity(severity) in _LOGGED_ONLY else "error"


def as_severe(bugs: Iterable[Bug], least: str | None) -> list[Bug]:
    """Return the bugs that are at least as severe as ``least``, or all of them."""
    rank = list(Severity).index
    return [bug for bug in bugs if least is None or rank(bug.severity) <= rank(Severity(least))]


def fails(answer: Answer, fail_on: str) -> bool:
    """Return whether the exit code is 1.

    An ignore whose review is due, and an argument behind ``--`` that is not used, fail every gate but ``never``.
    """
    trainers = [trainer for file in answer["files"] for trainer in file["trainers"]]
    hits = [bug for trainer in trainers for bug in trainer["hits"]]
    due = is_due(answer["ignores"]) or any(file["not_used"] for file in answer["files"])
    if fail_on == "never":
        return False
    if fail_on == "unrepaired":
        return due or any(not bug["run_repairs"] for bug in hits)
    if fail_on == "hit" or hits or due:
        return due or bool(hits)
    return (
        not trainers
        or any(trainer["cannot_tell"] for trainer in trainers)
        or any(file["uncertain"] or file["error"] is not None for file in answer["files"])
    )
