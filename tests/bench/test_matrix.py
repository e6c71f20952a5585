"""Self-tests and proofs on real TRL releases: some are run here, and of all others nothing on record is stale.

`make matrix` runs all of them. CI also runs what is not on record, and a part of the rest that changes by commit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from trl_hotfix.catalogue import loading

from bench.proving import cells as self_tests
from bench.proving import proofs as trainings
from bench.proving.running import GOOD, Case
from bench.releases import layout
from bench.results import evidence, keys

PATCHES = loading.load()
BY_ID = {patch.id: patch for patch in PATCHES}
CONSOLE = Console()
RELEASES = ("0.11.4", "0.16.1", layout.releases()[-1])
PLACES = [layout.main_place(release) for release in RELEASES]
SEEDS = {
    "moe-aux-loss-lost-under-deepspeed": "0.11.4",
    "grpo-peft-no-input-grads": "0.15.2",
    "grpo-loss-normalisation": "0.16.1",
    "dpo-precomputed-ref-logps-dropped": "0.12.2",
    "sft-padding-free-contamination": "0.16.1",
}
"""The bugs that the project began with, and a release that has each."""


@pytest.fixture(scope="session")
def cells() -> Mapping[tuple[str, layout.Place], Any]:
    layout.build(PLACES)
    cases = [Case(patch, place) for place in PLACES for patch in PATCHES]
    # No result is taken from an earlier run or from another release.
    answers = self_tests.run(cases, os.cpu_count() or 1, CONSOLE, share=False, fresh=True)
    return {(answer["patch"], evidence.place_of(answer)): answer for answer in answers}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_self_test_gives_the_verdict_of_the_range_and_of_the_record(
    cells: Any, patch: Any, place: layout.Place
) -> None:
    cell = cells[patch.id, place]
    expected = "proven" if place.targets_of(patch) else "absent"
    assert (cell["verdict"], cell["why"]) == (expected, cell["why"] if expected == "absent" else "")
    recorded = {evidence.place_of(cell): cell for cell in evidence.load(patch.id)["cells"]}[place]
    assert (recorded["verdict"], recorded["bodies"], recorded["key"]) == (cell["verdict"], cell["bodies"], cell["key"])


@pytest.fixture(scope="session")
def seed_proofs() -> Mapping[str, Any]:
    cases = [Case(BY_ID[patch_id], layout.main_place(release)) for patch_id, release in SEEDS.items()]
    layout.build([case.place for case in cases])
    answers = trainings.run(cases, os.cpu_count() or 1, CONSOLE, share=False, fresh=True)
    return {answer["patch"]: answer for answer in answers}


@pytest.mark.parametrize("patch_id", SEEDS)
def test_the_proof_of_a_seed_bug_is_red_green_and_red(seed_proofs: Any, patch_id: str) -> None:
    proof = seed_proofs[patch_id]
    assert (proof["verdict"], proof["why"]) == ("proven", "")
    verdicts = {name: run["verdict"] for name, run in proof["runs"].items()}
    assert verdicts.items() >= {"red": "reproduced", "green": "fixed", "red again": "reproduced"}.items()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_every_cell_on_record_is_good_and_of_the_present_code(patch: Any) -> None:
    recorded = {evidence.place_of(cell): cell for cell in evidence.load(patch.id)["cells"]}
    assert recorded.keys() == set(layout.places()), "run `python -m bench run`"
    stale = [str(place) for place, cell in recorded.items() if cell["key"] != keys.cell_key(patch, place)]
    assert stale == [], f"run `python -m bench run --patches {patch.id}` and commit evidence/{patch.id}.json"
    for place, cell in recorded.items():
        assert cell["verdict"] == ("proven" if place.targets_of(patch) else "absent"), (place, cell["why"])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_range_is_the_one_that_the_self_tests_propose(patch: Any) -> None:
    record = evidence.load(patch.id)
    assert patch.trl == evidence.proposed_range(patch, [*record["cells"], *record["beneath"]])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_proofs_and_parity_are_on_record(patch: Any) -> None:
    record = evidence.load(patch.id)
    settings = trainings.settings_of(patch)
    proven = [proof for proof in record["proofs"] if proof["verdict"] == "proven"]
    assert proven
    assert {proof["verdict"] for proof in record["proofs"]} <= set(GOOD)
    if settings["unaffected"]:
        assert all("unaffected" in proof["runs"] for proof in proven)
    compared = {evidence.place_of(comparison) for comparison in record["parity"]}
    if settings.get("PARITY"):
        places = {evidence.place_of(proof) for proof in proven}
        # Two lines of transformers may name the weights differently.
        on_main_stacks = {place for place in places if place.is_main and trainings.has_parity(patch, place.release)}
        assert on_main_stacks <= compared <= places
    for comparison in record["parity"]:
        assert comparison["loss_difference"] <= 1e-6
        assert comparison["gradient_difference"] <= 1e-6
        assert comparison["gradients"] > 0
