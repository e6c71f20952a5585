"""Every proof again in the variants of other users: compiled, and with an adapter or without."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from trl_hotfix.catalogue import loading

from bench.proving import proofs
from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

PATCHES = {patch.id: patch for patch in loading.load()}
SECONDS_A_PATCH = 300
Answer = Mapping[str, Any]


def first_place(patch_id: str) -> layout.Place:
    """Return the first release that has the bug."""
    return next(place for place in layout.places() if place.targets_of(PATCHES[patch_id]))


def first_process(patch_id: str) -> tuple[layout.Place, tuple[str, ...]]:
    """Return that place, and the overlays of the patch there."""
    place = first_place(patch_id)
    return place, proofs.overlays_of(PATCHES[patch_id], place)


def run(place: layout.Place, overlays: Sequence[str], ids: Sequence[str], backend: str) -> Mapping[str, Answer | str]:
    command = ["-m", "bench.proving.variants", "{out}", str(SECONDS_A_PATCH), backend, *ids]
    answers = process(place, command, 120 + SECONDS_A_PATCH * len(ids), *overlays)
    return dict.fromkeys(ids, answers) if isinstance(answers, str) else answers


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[str, Answer | str]:
    """Return the answer for each patch."""
    ids = sharing.by_place((first_process(case["patch_id"]), case["patch_id"]) for case in sharing.parameters(request))
    layout.build(place for place, _ in ids)
    answers = sharing.side_by_side(lambda where: run(*where, ids[where], "aot_eager"), ids)
    return {patch_id: answer for of_place in answers.values() for patch_id, answer in of_place.items()}


def check(answer: Answer | str) -> None:
    """Check that every variant is proven, unless the proof states why not, and that compiled code computes the same."""
    assert not isinstance(answer, str), answer
    if answer.get("why not"):
        return
    assert answer.keys() >= {"eager", "compiled"}
    for variant, run in answer.items():
        if variant == "eager":
            continue
        if run["why not"] is not None:
            # Otherwise the reason is out of date.
            assert run["verdict"] in ("absent", "error"), (variant, run)
            continue
        assert run["verdict"] == "proven", (variant, run)
        assert run.get("difference", 0.0) <= 1e-5, (variant, run)


@pytest.mark.parametrize("patch_id", sharing.heavy(PATCHES))
def test_the_proof_holds_compiled_and_with_an_adapter(answers: Mapping[str, Answer], patch_id: str) -> None:
    check(answers[patch_id])


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_the_proof_holds_when_inductor_compiles() -> None:
    patch_id = "dpo-aux-loss-dropped"
    place, overlays = first_process(patch_id)
    layout.build([place])
    check(run(place, overlays, [patch_id], "inductor")[patch_id])
