"""SARIF 2.1.0, for code scanning: the rules, results and logs of ``scan`` and ``audit``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from .. import __version__
from ..errors import SHOWN, shortened
from ..model import Bug, Patch
from ..reporting.sentences import fixed_of, no_repair
from .accepted import REVIEW_IS_DUE, IgnoreProblem
from .gate import level_of

PROJECT = "https://github.com/huggingface/trl"
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_DUE = "ignore-review-due"


def log(
    bugs: Sequence[Bug], results: Iterable[dict[str, Any]], warnings: Iterable[str], problems: Sequence[IgnoreProblem]
) -> dict[str, Any]:
    """Return a log with a rule for each bug. ``warnings`` become notifications, and so do ignores without a finding.

    An ignore whose review is due is a result.
    """
    due = [problem for problem in problems if problem["problem"] == REVIEW_IS_DUE]
    rules = [_rule(bug) for bug in bugs] + ([_DUE_RULE] if due else [])
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    all_results = [*results, *(_due(problem) for problem in due)]
    for result in all_results:
        result["ruleIndex"] = index[result["ruleId"]]
    texts = [*warnings, *(problem["text"] for problem in problems if problem not in due)]
    notifications = [{"level": "warning", "message": {"text": shortened(text, SHOWN)}} for text in texts]
    run = {
        "tool": {"driver": {"name": "trl_hotfix", "semanticVersion": __version__, "rules": rules}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
        "results": all_results,
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def result(bug_id: str, level: str, text: str, file: str, lines: Sequence[int]) -> dict[str, Any]:
    """Return a result at the first line, with the others as related locations."""
    locations = [_location(file, line) for line in lines]
    return {
        "ruleId": bug_id,
        "level": level,
        "message": {"text": shortened(text, SHOWN)},
        "locations": locations[:1],
        "relatedLocations": locations[1:],
    }


def suppressed(made: dict[str, Any], reason: str, place: str, file: str) -> dict[str, Any]:
    """Return a result that the user accepts, in the file itself or elsewhere."""
    kind = "inSource" if place.startswith(f"{file}, ") else "external"
    return {**made, "suppressions": [{"kind": kind, "justification": f"{reason} ({place})"}]}


def _location(file: str, line: int) -> dict[str, Any]:
    artifact = {"uri": PurePath(file).as_posix()}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}


_DUE_RULE = {
    "id": _DUE,
    "shortDescription": {"text": "The review of an ignore is due"},
    "defaultConfiguration": {"level": "error"},
}


def _due(problem: IgnoreProblem) -> dict[str, Any]:
    return result(_DUE, "error", problem["text"], problem["file"] or "", [problem["line"] or 1])


def _rule(bug: Bug) -> dict[str, Any]:
    repair = bug.how if isinstance(bug, Patch) else f"trl_hotfix: {no_repair(fixed_of(bug))}"
    rule = {
        "id": bug.id,
        "shortDescription": {"text": bug.title},
        "fullDescription": {"text": bug.why},
        "help": {"text": f"{repair}\n\ntrl-hotfix explain {bug.id}"},
        "defaultConfiguration": {"level": level_of(bug.severity.value)},
        "properties": {"tags": [bug.severity.value]},
    }
    thread = bug.upstream.issue or bug.upstream.fix
    number = thread[0] if isinstance(thread, tuple) else thread
    return {**rule, "helpUri": f"{PROJECT}/issues/{number}"} if number is not None else rule
