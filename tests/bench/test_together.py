"""Patches on the same method in every order, and all patches of a release, which revert without a trace."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from packaging.version import Version
from rich.console import Console

from trl_hotfix.catalogue import loading

import layout
from bench import HERE, Bench

PATCHES = loading.load()
RELEASES = ("0.9.6", "0.11.4", "0.12.2", "0.16.1", "0.19.1", "0.23.0", "0.29.1", "1.7.1", "1.16.0")
TRAINERS = {"SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward", "ORPO", "CPO", "OnlineDPO", "GKD"}
Run = tuple[str, ...]


def groups() -> dict[frozenset[str], layout.Place]:
    """Return groups of two or three patches with a common target, and the first release where they have it.

    Any two patches of one target are together in some group, and the groups are as few as groups of three allow: three
    patches are applied one by one, in every order, and so is each pair of them.
    """
    places: dict[frozenset[str], layout.Place] = {}
    covered: set[frozenset[str]] = set()
    for size in (3, 2):
        for place in layout.places():
            by_target: dict[str, list[str]] = {}
            for patch in PATCHES:
                for target in place.targets_of(patch):
                    by_target.setdefault(target.name, []).append(patch.id)
            for ids in by_target.values():
                subsets = [frozenset(subset) for subset in itertools.combinations(ids, size)]
                # Groups with the most uncovered pairs come first.
                for _ in subsets:
                    best = max(subsets, key=lambda group: len(pairs(group) - covered))
                    if not pairs(best) - covered:
                        break
                    covered |= pairs(best)
                    places[best] = place
    return places


def pairs(group: frozenset[str]) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in itertools.combinations(sorted(group), 2)}


GROUPS = {tuple(sorted(ids)): place for ids, place in groups().items()}
PLACES = [place for place in layout.places(RELEASES) if place.stack != "tf5.23" or place.release == RELEASES[-1]]


@pytest.fixture(scope="session")
def answers(everywhere: None) -> Mapping[tuple[layout.Place, Run], Any]:
    runs: list[tuple[layout.Place, Run]] = [(place, ("orders", *ids)) for ids, place in GROUPS.items()]
    runs += [(place, (mode,)) for place in PLACES for mode in ("all", "trainers")]
    bench = Bench(1, True, Console(quiet=True))

    def run(place: layout.Place, arguments: Run) -> Any:
        return bench.process(place, [str(HERE / "together.py"), "{out}", *arguments], 300)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(runs, pool.map(lambda task: run(*task), runs), strict=True))


@pytest.mark.parametrize("ids", GROUPS, ids="+".join)
def test_patches_on_one_method_work_in_every_order(answers: Mapping[Any, Any], ids: Run) -> None:
    answer = answers[GROUPS[ids], ("orders", *ids)]
    assert not isinstance(answer, str), answer
    assert answer["orders"] == (4 if len(ids) == 2 else 18)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_all_patches_revert_without_a_trace(answers: Mapping[Any, Any], place: layout.Place) -> None:
    answer = answers[place, ("all",)]
    assert not isinstance(answer, str), answer
    assert answer["patches"] == sum(bool(place.targets_of(patch)) for patch in PATCHES)
    assert answer["compared"] > 30


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_trainer_trains_with_all_patches(answers: Mapping[Any, Any], place: layout.Place) -> None:
    answer = answers[place, ("trainers",)]
    assert not isinstance(answer, str), answer
    for patch in PATCHES:
        applies = place.targets_of(patch)
        not_applied = {
            "skipped (requirement)",
            "skipped (trl-version)",
            "retired (fixed-upstream)",
            "disabled (not-selected)",
        }
        assert answer["on"][patch.id] in ({"applied (proven)"} if applies else not_applied), patch.id
    expected = TRAINERS - ({"GRPO"} if Version(place.release) < Version("0.14") else set())
    expected -= {"OnlineDPO", "RLOO", "GKD"} if Version(place.release) < Version("0.11") else set()
    assert answer["trainers"].keys() >= expected
    for name, run in answer["trainers"].items():
        assert not isinstance(run, str), (name, run)
        assert run["losses"], name
        assert all(math.isfinite(loss) for loss in run["losses"]), (name, run)
