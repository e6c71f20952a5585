"""The self-tests of patches on every release. One run serves all releases on which all that it called is equal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from trl_hotfix.matching.gates import lacking
from trl_hotfix.model import Patch

from bench.proving.running import GOOD, Answer, Case, in_parallel, is_kept, process
from bench.releases import trl_code
from bench.releases.layout import BENCH, Place
from bench.results import evidence, keys

SECONDS = 60.0
"""The limit for one self-test, red, green and red."""

SHARED_ROUNDS = 1
"""Then the rest is run at once: to import TRL again takes as long as several self-tests."""


def missing(patches: Iterable[Patch], places: Sequence[Place]) -> list[Case]:
    """Return the cells that are not on record with the present key."""
    cases = []
    for patch in patches:
        on_record = {evidence.place_of(cell): cell["key"] for cell in evidence.load(patch.id)["cells"]}
        cases += [Case(patch, place) for place in places if on_record.get(place) != keys.cell_key(patch, place)]
    return cases


def missing_beneath(patches: Iterable[Patch], places: Sequence[Place]) -> list[Case]:
    """Return the cells with a transformers between the stacks that are not on record with the present key."""
    cases = []
    for patch in patches:
        on_record = {evidence.place_of(cell): cell["key"] for cell in evidence.load(patch.id)["beneath"]}
        planned = [place for place in evidence.beneath_of(patch) if place.release in {each.release for each in places}]
        cases += [Case(patch, place) for place in planned if on_record.get(place) != keys.cell_key(patch, place)]
    return cases


def run(cases: Iterable[Case], jobs: int, console: Console, *, share: bool = True, fresh: bool = False) -> list[Answer]:
    """Return a cell for each case. ``share``: equal releases share a run. ``fresh``: kept results are not used."""
    remaining = list(cases)
    answers: list[Answer] = []
    rounds = 0
    while remaining:
        rounds += 1
        chosen = _newest_of_each_group(remaining) if share and rounds <= SHARED_ROUNDS else remaining
        new = _run(chosen, jobs, console, fresh)
        answers += new
        finished = {case.name for case in chosen}
        if share:
            by_group: dict[Any, list[Answer]] = {}
            for case, answer in zip(chosen, new, strict=True):
                by_group.setdefault(_group(case), []).append(answer)
            for case in remaining:
                serving = [answer for answer in by_group.get(_group(case), ()) if _serves(answer, case)]
                if case.name not in finished and serving:
                    answers.append({**serving[0], "release": case.place.release})
                    finished.add(case.name)
        remaining = [case for case in remaining if case.name not in finished]
    return answers


def _group(case: Case) -> tuple[Any, ...]:
    """Return what is known before a run: only cases of one group can share it."""
    patch, place = case
    return patch.id, place.stack, keys.cell_key(patch, place), bodies_of(patch, place.release)


def bodies_of(patch: Patch, release: str) -> tuple[str | None, ...]:
    """Return what the targets of ``patch`` are in a release of TRL: releases that share a run have the same."""
    return tuple(evidence.body_or_base(release, target) for target in patch.targets)


def _newest_of_each_group(cases: Iterable[Case]) -> list[Case]:
    """Return the newest case of each group: later rounds then look at ever older releases."""
    return list({_group(case): case for case in cases}.values())


def _serves(answer: Answer, case: Case) -> bool:
    """Return whether ``answer`` is that of ``case`` too: TRL is the same there in all that the run called."""
    if answer["verdict"] not in GOOD:
        return False
    # Where no target exists, nothing was called, and there was nothing to test. Beside libraries that the patch does
    # not ask for, a self-test that calls nothing of TRL has looked at these libraries, which are those of the group.
    nothing_to_test = answer["verdict"] == "absent" and not answer["bodies"]
    other_libraries = lacking(case.patch, case.place.versions_for(case.patch)) is not None
    if not answer["calls"] and not nothing_to_test:
        return bool(answer["verdict"] == "absent" and other_libraries)
    return bool(trl_code.key(case.place.release, answer["calls"]) == answer["trl"])


def _run(cases: Sequence[Case], jobs: int, console: Console, fresh: bool) -> list[Answer]:
    """Run these cases, all those of one place and the same overlays in one process, and answer in their order."""
    by_process: dict[tuple[Place, tuple[str, ...]], list[Patch]] = {}
    for case in cases:
        if fresh or not is_kept(_file(case)):
            by_process.setdefault((case.place, case.place.overlays_of(case.patch)), []).append(case.patch)

    def run_place(work: tuple[tuple[Place, tuple[str, ...]], list[Patch]]) -> list[Answer]:
        (place, overlays), patches = work
        ids = [patch.id for patch in patches]
        arguments = ["-m", "bench.proving.release", "{out}", str(SECONDS), *ids]
        result = process(place, arguments, 120 + SECONDS * len(ids), *overlays)
        if isinstance(result, str):
            empty: Answer = {"leaves": {}, "bodies": {}, "calls": []}
            result = {"cells": [{"patch": patch_id, "verdict": "error", "why": result, **empty} for patch_id in ids]}
        by_id = {cell["patch"]: cell for cell in result["cells"]}
        return [_kept(Case(patch, place), by_id[patch.id]) for patch in patches]

    in_parallel("self-tests, by release", list(by_process.items()), run_place, jobs, console)
    return [json.loads(_file(case).read_text()) for case in cases]


def _file(case: Case) -> Path:
    """Return where the result is kept, so that an interrupted run continues where it stopped."""
    return BENCH / "results" / f"cell-{case.patch.id}-{case.place}-{keys.cell_key(*case)}.json"


def _kept(case: Case, cell: Answer) -> Answer:
    patch, place = case
    result = {name: cell[name] for name in ("patch", "verdict", "why", "leaves", "bodies", "calls")}
    where = {"release": place.release, "stack": place.stack, "ran": place.release}
    where |= {"transformers": place.transformers} if place.transformers else {}
    trl = trl_code.key(place.release, cell["calls"])
    answer = {**where, **result, "key": keys.cell_key(patch, place), "trl": trl}
    _file(case).parent.mkdir(parents=True, exist_ok=True)
    _file(case).write_text(json.dumps(answer))
    return answer
