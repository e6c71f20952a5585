"""The bugs of a run. Where the arguments cannot settle one, its repair does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..matching.hits import Answer

FOUND = "found by the repair itself, in a small run"
NOT_CALLED = "your class does not call what TRL does wrong here"


def settled(facts: Mapping[str, Any], notes: Mapping[str, Collection[str]]) -> list[dict[str, Any]]:
    """Return the bugs of a run. ``notes`` has the patches that stood in a run with all, was called and acted.

    A repair that acted had something to repair. One that ran and never acted had nothing, unless its bug needs what a
    small run leaves out.
    """
    found = []
    for bug in facts["bugs"]:
        name, is_hit = bug["id"], bug["answer"] == Answer.HIT.value
        if not is_hit and name in notes["acted"]:
            bug = {**bug, "answer": Answer.HIT.value, "because": [*bug["because"], FOUND], "unknown": []}
        elif not is_hit and name in notes["called"] and not bug["narrowed"]:
            continue
        elif is_hit and facts["methods"] and name in notes["standing"] and name not in notes["called"]:
            bug = {**bug, "answer": Answer.CANNOT_TELL.value, "unknown": [NOT_CALLED]}
        found.append(bug)
    return sorted(found, key=lambda bug: bug["answer"] != Answer.HIT.value)
