"""Make the page of trainers and releases: how many known bugs each trainer has in each release, repaired and not."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import config_defaults, gates
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Bug, KnownBug, Severity
from trl_hotfix.reporting.sentences import repair_of

ANY = "*"


def bugs() -> list[Bug]:
    """Return the bugs that are counted: without diagnoses, and without those that only a named patch takes for one."""
    known: list[Bug] = [*loading.load(), *loading.without_repair()]
    return [bug for bug in known if repair_of(bug) != "if named" and bug.severity is not Severity.DIAGNOSIS]


def trainers_hit(bug: Bug, release: str) -> set[str]:
    """Return the trainers that may hit a bug in a release; ``ANY`` stands for all."""
    if not gates.has_bug(release, bug):
        return set()
    return {name for hit in bug.hits if hit.trl is None or in_range(release, hit.trl) for name in hit.trainers}


@functools.cache
def counts() -> dict[str, dict[str, tuple[int, int]]]:
    """Return by release and trainer how many bugs have a repair here, and how many have none.

    A trainer that a release does not have, by its config, is left out.
    """
    known = bugs()
    names = {name for bug in known for hit in bug.hits for name in hit.trainers} - {ANY}
    releases = bodies().releases
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for release in releases:
        hit = [(isinstance(bug, KnownBug), trainers_hit(bug, release)) for bug in known]
        table[release] = {}
        for name in sorted(names):
            if config_defaults.defaults(release, name, releases) is None:
                continue
            without = [is_known for is_known, trainers in hit if name in trainers or ANY in trainers]
            table[release][name] = (without.count(False), without.count(True))
    return table


def table() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    by_release = counts()
    names = {name for row in by_release.values() for name in row}
    # The trainers with the most bugs come first.
    order = sorted(names, key=lambda name: (-sum(sum(row.get(name, (0, 0))) for row in by_release.values()), name))
    yield "# By trainer and release"
    yield ""
    yield (
        "How many known bugs a trainer may hit in a release of TRL: **5 + 2** are 5 that trl_hotfix repairs by default "
        "and 2 that are known and have no repair here. Empty: the release has no such trainer. Which of them hit a "
        "script, tells [scan](../scan.md). A bug that nobody has found is in no number, and the newest releases have "
        "been looked at for the shortest time."
    )
    yield ""
    yield f"| TRL | {' | '.join(order)} |"
    yield f"|---|{'---|' * len(order)}"
    for release, row in reversed(by_release.items()):
        cells = [_cell(row.get(name)) for name in order]
        yield f"| {release} | {' | '.join(cells)} |"


def _cell(count: tuple[int, int] | None) -> str:
    if count is None:
        return ""
    repaired, without = count
    # Without a line break between the two numbers.
    return f"{repaired}\u00a0+\u00a0{without}" if without else f"{repaired}"
