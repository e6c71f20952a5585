"""Every proof again as others train: compiled, and with an adapter where the proof trains all of the model."""

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
    """The first release that has the bug."""
    return next(place for place in layout.places() if place.targets_of(patch))


def run(place: layout.Place, patches: Sequence[Patch], backend: str) -> Mapping[str, Answer | str]:
    arguments = [str(HERE / "variants.py"), "{out}", str(SECONDS_A_PATCH), backend, *(patch.id for patch in patches)]
    overlays = dict.fromkeys(each for patch in patches for each in proof_of(patch).get("OVERLAYS", ()))
    limit = 120 + SECONDS_A_PATCH * len(patches)
    done = Bench(1, True, Console(quiet=True)).process(place, arguments, limit, *overlays)
    return {patch.id: done for patch in patches} if isinstance(done, str) else done


@pytest.fixture(scope="session")
def found(everywhere: None) -> Mapping[str, Answer | str]:
    """The answer for each patch: one process a release."""
    by_place: dict[layout.Place, list[Patch]] = {}
    for patch in PATCHES:
        by_place.setdefault(first_place(patch), []).append(patch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(lambda place: run(place, by_place[place], "aot_eager"), sorted(by_place))
    return {patch_id: answer for its in answers for patch_id, answer in its.items()}


def check(answer: Answer | str) -> None:
    """The verdicts are those of the proof by itself, except where the proof says why one is not; what was compiled
    computes the same."""
    assert not isinstance(answer, str), answer
    if answer.get("why not"):
        return
    assert answer.keys() >= {"eager", "compiled"}
    for variant, its in answer.items():
        if variant == "eager":
            continue
        if its["why not"] is not None:
            # Or the reason is none any more.
            assert its["verdict"] in ("absent", "error"), (variant, its)
            continue
        assert its["verdict"] == "proven", (variant, its)
        assert its.get("difference", 0.0) <= 1e-5, (variant, its)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_compiled_and_with_an_adapter_the_proof_says_the_same(found: Mapping[str, Answer], patch: Patch) -> None:
    check(found[patch.id])


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor_the_proof_says_the_same(everywhere: None) -> None:
    (patch,) = (each for each in PATCHES if each.id == "dpo-aux-loss-dropped")
    check(run(first_place(patch), [patch], "inductor")[patch.id])
