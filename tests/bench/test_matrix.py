"""Every patch on every real TRL release: the self-tests everywhere, the proofs on the newest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from trl_hotfix.catalogue import loading
from trl_hotfix.matching.fingerprints import bodies

import evidence
import layout
from bench import GOOD, Bench, gates, proof_of

PATCHES = loading.load()
NEWEST = layout.releases()[-1]
# Of the second transformers line only the newest release: `make matrix` runs all of them and records the results.
PLACES = [place for place in layout.places() if place.release == NEWEST or place.stack in layout.settings()["stacks"]]
PROVABLE = [patch for patch in PATCHES if gates.targets_for(patch, NEWEST)]


@pytest.fixture(scope="session")
def bench(everywhere: None, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    # No result is taken from another run: this one is the evidence.
    return Bench(os.cpu_count() or 1, fresh=True, console=Console(), results=tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="session")
def cells(bench: Bench) -> Mapping[tuple[str, layout.Place], Any]:
    answers = bench.cells(PATCHES, PLACES)
    return {(answer["patch"], layout.Place(answer["release"], answer["stack"])): answer for answer in answers}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_self_test_says_what_the_range_says(cells: Any, patch: Any, place: layout.Place) -> None:
    cell = cells[patch.id, place]
    expected = "proven" if place.targets_of(patch) else "absent"
    assert (cell["verdict"], cell["why"]) == (expected, cell["why"] if expected == "absent" else "")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_evidence_on_record_says_the_same(cells: Any, patch: Any) -> None:
    on_record = {
        (cell["patch"], layout.Place(cell["release"], cell["stack"])): cell for cell in evidence.load()["cells"]
    }
    for place in PLACES:
        cell, recorded = cells[patch.id, place], on_record[patch.id, place]
        assert (recorded["verdict"], recorded["bodies"]) == (cell["verdict"], cell["bodies"]), place
        assert not evidence.is_stale(recorded, bodies()), place


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_range_is_the_one_that_the_self_tests_propose(cells: Any, patch: Any) -> None:
    assert patch.trl == evidence.proposed_range(patch, list(cells.values()))


@pytest.fixture(scope="session")
def proofs(bench: Bench) -> list[Any]:
    return bench.proofs(PROVABLE, PLACES, "newest")


@pytest.mark.parametrize("patch", PROVABLE, ids=lambda patch: patch.id)
def test_the_proof_passes_on_the_newest_release(proofs: list[Any], patch: Any) -> None:
    answers = {answer["stack"]: answer for answer in proofs if answer["patch"] == patch.id}
    verdicts = {stack: answer["verdict"] for stack, answer in answers.items()}
    places = [place for place in PLACES if place.release == NEWEST]
    expected = {place.stack: "proven" if place.targets_of(patch) else "absent" for place in places}
    assert verdicts == expected, answers


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_proofs_and_parity_are_on_record(patch: Any) -> None:
    data = evidence.load()
    proofs = [proof for proof in data["proofs"] if proof["patch"] == patch.id]
    assert {proof["verdict"] for proof in proofs} <= set(GOOD)
    assert any(proof["verdict"] == "proven" for proof in proofs)
    assert all(proof["revision"] == patch.revision for proof in proofs)
    if proof_of(patch)["unaffected"]:
        assert all("unaffected" in proof["runs"] for proof in proofs if proof["verdict"] == "proven")
    for comparison in (comparison for comparison in data["parity"] if comparison["patch"] == patch.id):
        assert comparison["loss_difference"] <= 1e-6
        assert comparison["gradient_difference"] <= 1e-6
        assert comparison["gradients"] > 0
