"""Patches on the same method in many orders, and all patches of a release, which revert without a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from packaging.version import Version

from trl_hotfix.catalogue import loading

from bench.proving import orderings
from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

PATCHES = loading.load()
RELEASES = ("0.9.6", "0.11.4", "0.12.2", "0.16.1", "0.19.1", "0.23.0", "0.29.1", "1.7.1", "1.16.0")
TRAINERS = {"SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward", "ORPO", "CPO", "OnlineDPO", "GKD"}
SECONDS_A_TASK = 300


def on_one_method() -> list[tuple[layout.Place, str]]:
    """Return the sets of patches on one method, ``id+id``, with the first place of each; no subset of a larger one."""
    by_method: dict[str, dict[frozenset[str], layout.Place]] = {}
    for place in layout.places():
        ids: dict[str, set[str]] = {}
        for patch in PATCHES:
            for target in place.targets_beside(patch):
                ids.setdefault(target.name, set()).add(patch.id)
        for method, ids_of_method in ids.items():
            by_method.setdefault(method, {}).setdefault(frozenset(ids_of_method), place)
    largest = [
        (place, "+".join(sorted(ids)))
        for places in by_method.values()
        for ids, place in places.items()
        if len(ids) > 1 and not any(ids < others for others in places)
    ]
    return list(dict.fromkeys(largest))


def number_of_patches(place: layout.Place) -> int:
    return sum(bool(place.targets_beside(patch)) for patch in PATCHES)


SETS = on_one_method()
PLACES = [place for place in layout.places(RELEASES) if place.is_main or place.release == RELEASES[-1]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[layout.Place, Any]:
    """Return the answers of each place, by task."""
    tasks = sharing.by_place((case["place"], case["task"]) for case in sharing.parameters(request))
    layout.build(tasks)

    def run(place: layout.Place) -> Any:
        command = ["-m", "bench.inside.together", "{out}", str(SECONDS_A_TASK), *tasks[place]]
        return process(place, command, 60 + SECONDS_A_TASK * len(tasks[place]))

    return sharing.side_by_side(run, tasks)


def answer_to(answers: Mapping[layout.Place, Any], place: layout.Place, task: str) -> Any:
    assert not isinstance(answers[place], str), answers[place]
    answer = answers[place][task]
    assert not isinstance(answer, str), answer
    return answer


@pytest.mark.parametrize(("place", "task"), sharing.heavy(SETS, smoke=SETS[:1]), ids=str)
def test_patches_on_one_method_go_on_and_come_off_in_every_way(
    answers: Mapping[layout.Place, Any], place: layout.Place, task: str
) -> None:
    answer = answer_to(answers, place, task)
    assert answer["rounds"] == len(orderings.rounds(task.split("+")))
    assert answer["seed"] == orderings.SEED
    assert answer["compared"] > 30


def ends_of_stacks() -> list[layout.Place]:
    """Return the oldest and the newest release on each stack: what a self-test meets is also code of its libraries."""
    by_stack: dict[str, list[layout.Place]] = {}
    for place in layout.places():
        by_stack.setdefault(place.stack, []).append(place)
    return [place for places in by_stack.values() for place in (places[0], places[-1])]


ALL = [(place, "all") for place in dict.fromkeys([*PLACES, *ends_of_stacks()])]


@pytest.mark.parametrize(
    ("place", "task"), sharing.heavy(ALL, smoke=[max(ALL, key=lambda case: number_of_patches(case[0]))]), ids=str
)
def test_all_patches_go_on_in_silence_and_revert_without_a_trace(
    answers: Mapping[layout.Place, Any], place: layout.Place, task: str
) -> None:
    answer = answer_to(answers, place, task)
    assert answer["patches"] == number_of_patches(place)
    assert answer["compared"] > 30
    assert answer["warnings"] == []


@pytest.mark.parametrize(("place", "task"), sharing.heavy((place, "trainers") for place in PLACES), ids=str)
def test_every_trainer_trains_with_all_patches(
    answers: Mapping[layout.Place, Any], place: layout.Place, task: str
) -> None:
    answer = answer_to(answers, place, task)
    for patch in PATCHES:
        applies = place.targets_beside(patch)
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
