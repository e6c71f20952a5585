"""Every proof again in the variants of other users: compiled, and with an adapter or without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch

import layout
from bench import HERE, Bench, proof_of

PATCHES = loading.load()
SECONDS_A_PATCH = 300
Answer = Mapping[str, Any]


def first_place(patch: Patch) -> layout.Place:
    """Return the first release that has the bug."""
    return next(place for place in layout.places() if place.targets_of(patch))


def run(place: layout.Place, patches: Sequence[Patch], backend: str) -> Mapping[str, Answer | str]:
    arguments = [str(HERE / "variants.py"), "{out}", str(SECONDS_A_PATCH), backend, *(patch.id for patch in patches)]
    overlays = dict.fromkeys(overlay for patch in patches for overlay in proof_of(patch).get("OVERLAYS", ()))
    limit = 120 + SECONDS_A_PATCH * len(patches)
    answers = Bench(1, True, Console(quiet=True)).process(place, arguments, limit, *overlays)
    return {patch.id: answers for patch in patches} if isinstance(answers, str) else answers


@pytest.fixture(scope="session")
def answers(everywhere: None) -> Mapping[str, Answer | str]:
    """Return the answer for each patch, with one process per release."""
    by_place: dict[layout.Place, list[Patch]] = {}
    for patch in PATCHES:
        by_place.setdefault(first_place(patch), []).append(patch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda place: run(place, by_place[place], "aot_eager"), sorted(by_place))
    return {patch_id: answer for of_place in answers for patch_id, answer in of_place.items()}


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


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_proof_holds_compiled_and_with_an_adapter(answers: Mapping[str, Answer], patch: Patch) -> None:
    check(answers[patch.id])


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_the_proof_holds_when_inductor_compiles(everywhere: None) -> None:
    (patch,) = (patch for patch in PATCHES if patch.id == "dpo-aux-loss-dropped")
    check(run(first_place(patch), [patch], "inductor")[patch.id])
