"""Make the table of the home page: a row for each release, the newest first, and a column for each trainer."""

from __future__ import annotations

import json
from typing import Any

from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Severity
from trl_hotfix.reporting.sentences import repair_of

from tools.pages import release_pages


def data(suffix: str) -> dict[str, Any]:
    """Return what the script reads. ``suffix`` is how an address of a page ends."""
    severities = list(Severity)
    bugs = sorted(release_pages.bugs(), key=lambda bug: (severities.index(bug.severity), bug.id))
    releases = list(reversed(list(bodies().releases)))
    counts = release_pages.counts()
    names = {name for row in counts.values() for name in row}
    # The columns: trainers with the most bugs come first.
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
    return {"releases": releases, "trainers": trainers_by_bugs, "bugs": rows, "hit": hit}


def html(suffix: str) -> str:
    """Return the table, which the script fills. Without scripts it is a link to the page of trainers and releases."""
    text = json.dumps(data(suffix), separators=(",", ":")).replace("</", "<\\/")
    return (
        "## Which bugs does my trainer have?\n\n"
        '<form id="chooser" class="chooser" hidden>\n'
        "<label>Trainer <select></select></label>\n"
        '<div class="chooser-box" tabindex="0" aria-label="Bugs by release and trainer"><table class="chooser-grid">'
        "</table></div>\n"
        '<p class="chooser-key"><i class="repaired">7</i> repaired <i class="known">+1</i> known, no repair. '
        "Choose a number to see its bugs.</p>\n"
        '<div id="chooser-answer"><p id="chooser-count" role="status"></p><ul id="chooser-bugs"></ul></div>\n</form>\n'
        f'<script id="chooser-data" type="application/json">{text}</script>\n\n'
        "[The same as a plain table](bugs/releases.md)"
    )
