"""The catalogue as a feed of OSV records (https://ossf.github.io/osv-schema/), so that other scanners can use it.

``make osv`` writes ``build/osv/``: a file for each bug. They are no security advisories: ``database_specific`` says
what kind of bug it is, by trl_hotfix's own words. The ids have the prefix ``x_``, which OSV has for databases that are
not registered.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Bug, Patch
from trl_hotfix.reporting.sentences import fixed_of, no_repair

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "build" / "osv"
TRL = "https://github.com/huggingface/trl"


def feed(modified: str) -> dict[str, dict[str, Any]]:
    """Return the record of each bug by its id. ``modified`` is the time of the last change, as RFC 3339 in UTC."""
    bugs: list[Bug] = [*loading.load(), *loading.without_repair()]
    return {f"x_trl_hotfix-{bug.id}": record(bug, modified) for bug in bugs}


def record(patch: Bug, modified: str) -> dict[str, Any]:
    affected = [trl for trl in bodies().releases if gates.has_bug(trl, patch)]
    return {
        "schema_version": "1.7.0",
        "id": f"x_trl_hotfix-{patch.id}",
        "modified": modified,
        "summary": patch.title,
        "details": f"{patch.why}\n\n{_repair(patch)}",
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": "trl", "purl": "pkg:pypi/trl"},
                "ranges": [{"type": "ECOSYSTEM", "events": list(events(affected))}],
                "versions": affected,
                "ecosystem_specific": {"requires": dict(patch.requires)},
            }
        ],
        "references": list(references(patch)),
        "database_specific": {"kind": patch.severity.value, **_in_database(patch)},
    }


def _repair(bug: Bug) -> str:
    if isinstance(bug, Patch):
        return f"Repair by trl_hotfix: {bug.how}"
    return f"Repair by trl_hotfix: none ({no_repair(fixed_of(bug))})"


def _in_database(bug: Bug) -> dict[str, Any]:
    if isinstance(bug, Patch):
        return {"repair": "on by default" if bug.default else "off unless named", "revision": bug.revision}
    return {"repair": "none"}


def events(affected: list[str]) -> Iterator[dict[str, str]]:
    """Yield where the bug begins, and the first release without it or the last that was looked at, run by run."""
    releases = list(bodies().releases)
    for position, trl in enumerate(releases):
        before = position > 0 and releases[position - 1] in affected
        if trl in affected and not before:
            yield {"introduced": trl}
        elif before and trl not in affected:
            yield {"fixed": trl}


def references(patch: Bug) -> Iterator[dict[str, str]]:
    for kind, name, numbers in (("REPORT", "issues", patch.upstream.issue), ("FIX", "pull", patch.upstream.fix)):
        for number in numbers if isinstance(numbers, tuple) else filter(None, [numbers]):
            yield {"type": kind, "url": f"{TRL}/{name}/{number}"}


def last_change() -> str:
    """Return the time of the last commit that changed the catalogue."""
    command = ["git", "log", "-1", "--format=%ct", "--", "patches.yaml", "known.yaml"]
    seconds = int(subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout or "0")
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    records = feed(last_change())
    for name, content in records.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(records)} records in {FOLDER.relative_to(CHECKOUT)}")


if __name__ == "__main__":
    main()
