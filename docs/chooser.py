"""Make the chooser of the home page: a trainer and a release, the newest first, and the bugs that they may hit."""

from __future__ import annotations

import json
from typing import Any

from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Severity
from trl_hotfix.reporting.sentences import repair_of

import release_pages

MARK = "<!-- chooser -->"
"""This line of the README is replaced by the chooser on the site."""


def data(suffix: str) -> dict[str, Any]:
    """Return what the script reads. ``suffix`` is how an address of a page ends."""
    severities = list(Severity)
    bugs = sorted(release_pages.bugs(), key=lambda bug: (severities.index(bug.severity), bug.id))
    releases = list(reversed(list(bodies().releases)))
    counts = release_pages.counts()
    names = {name for row in counts.values() for name in row}
    # The script offers the first one that a release has.
    trainers_by_bugs = sorted(
        names, key=lambda name: (-sum(sum(row.get(name, (0, 0))) for row in counts.values()), name)
    )
    hit: dict[str, dict[str, list[int]]] = {}
    for release in releases:
        trainers = [release_pages.trainers_hit(bug, release) for bug in bugs]
        hit[release] = {
            name: [index for index, names in enumerate(trainers) if name in names or release_pages.ANY in names]
            for name in trainers_by_bugs
            if name in counts[release]
        }
    rows = [
        {
            "title": bug.title,
            "severity": bug.severity.value,
            "repair": repair_of(bug),
            "page": f"bugs/{bug.id}{suffix}",
        }
        for bug in bugs
    ]
    return {"releases": releases, "bugs": rows, "hit": hit}


def html(suffix: str) -> str:
    """Return the chooser. Without scripts it is a link to the table of all trainers and releases."""
    text = json.dumps(data(suffix), separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<form id="chooser" class="chooser" hidden>\n'
        "<label>Trainer <select></select></label> <label>TRL <select></select></label>\n"
        '<p id="chooser-count" role="status"></p>\n<ul id="chooser-bugs"></ul>\n</form>\n'
        f'<script id="chooser-data" type="application/json">{text}</script>\n\n'
        "[All trainers and releases in one table](bugs/releases.md)"
    )
