"""The tests of each patch pass on the releases that have its bug.

`make test` runs those of the newest TRL, and on the first and the newest release that has the bug those that changed
since the mutants of their patch were counted: that count runs them without a mutant there, and fails if they fail.
`make patches` runs all of them on the first and the newest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from trl_hotfix.catalogue import loading

from bench.mutants import counting
from bench.proving import patch_tests
from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

SECONDS_A_PATCH = 120
PATCHES = {patch.id: patch for patch in loading.load() if patch_tests.file_of(patch.id).is_file()}
NEWEST = layout.main_place(layout.releases()[-1])
CHANGED = {patch.id for patch in PATCHES.values() if not counting.is_current(patch)}
SMOKE = [
    (place, patch_id)
    for patch_id, patch in PATCHES.items()
    for place in layout.first_and_newest(patch)
    if place == NEWEST or patch_id in CHANGED or "FIRST_AND_NEWEST" in os.environ
]
EVERYWHERE = [
    (place, patch_id) for place in layout.places() for patch_id, patch in PATCHES.items() if place.targets_of(patch)
]

Around = tuple[layout.Place, tuple[str, ...]]
"""A place, and the overlays beside it."""


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[Around, Any]:
    """Return the outcomes by patch, for each place with what the patches require beside it."""
    cases = [(case["place"], case["patch_id"]) for case in sharing.parameters(request)]
    layout.build({place for place, _ in cases})
    ids = sharing.by_place((around(place, patch_id), patch_id) for place, patch_id in cases)

    def run(where: Around) -> Any:
        place, overlays = where
        command = ["-m", "bench.proving.patch_tests", "{out}", str(SECONDS_A_PATCH), *ids[where]]
        return process(place, command, 300 + SECONDS_A_PATCH * len(ids[where]), "pytest", *overlays)

    return sharing.side_by_side(run, ids)


def around(place: layout.Place, patch_id: str) -> Around:
    return place, place.overlays_of(PATCHES[patch_id])


@pytest.mark.parametrize(("place", "patch_id"), sharing.heavy(EVERYWHERE, smoke=SMOKE), ids=str)
def test_the_tests_of_a_patch_pass(answers: Mapping[Around, Any], place: layout.Place, patch_id: str) -> None:
    answer = answers[around(place, patch_id)]
    assert not isinstance(answer, str), answer
    outcomes = answer[patch_id]
    assert not isinstance(outcomes, str), outcomes
    failed = [f"{name}\n{report}" for name, (outcome, report) in outcomes.items() if outcome == "failed"]
    assert not failed, "\n\n".join(failed)
    assert any(outcome == "passed" for outcome, _ in outcomes.values()), outcomes


def test_a_patch_without_a_count_counts_as_changed() -> None:
    patch = next(iter(PATCHES.values()))
    with_other_tests = msgspec.structs.replace(patch, revision=patch.revision + 1)
    assert counting.is_current(patch)
    assert not counting.is_current(with_other_tests)


def test_every_file_is_of_a_patch_and_in_its_family() -> None:
    files = set(patch_tests.FOLDER.glob("*/test_*.py"))
    assert files == {patch_tests.file_of(patch_id) for patch_id in PATCHES}


def test_pytest_can_put_the_plugin_into_a_set() -> None:
    """It does so where the folder of a family has a conftest of its own, as that of ``beneath``."""
    one, other = patch_tests.Outcomes(), patch_tests.Outcomes()
    assert len({one, other}) == 2
