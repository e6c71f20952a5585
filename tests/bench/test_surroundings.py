"""Self-tests in the surroundings of a job return the same verdicts, and leave no trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console

from trl_hotfix.catalogue import loading

import layout
import surroundings
from bench import HERE, Bench


def cover() -> dict[layout.Place, set[str]]:
    """Return the newest release and a few others that together have every patch, with the patches of each."""
    places = layout.places()
    ids_by_place = {place: {patch.id for patch in loading.load() if place.targets_of(patch)} for place in places}
    chosen = {places[-1]: ids_by_place[places[-1]]}
    while missing := set().union(*ids_by_place.values()) - set().union(*chosen.values()):
        best = max(places, key=lambda place: len(ids_by_place[place] & missing))
        chosen[best] = ids_by_place[best]
    return chosen


PLACES = cover()


@pytest.fixture(scope="session")
def answers(everywhere: None) -> Mapping[layout.Place, Any]:
    bench = Bench(1, True, Console(quiet=True))

    def run(place: layout.Place) -> Any:
        return bench.process(place, [str(HERE / "surroundings.py"), "{out}"], 600, "deepspeed")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(PLACES, pool.map(run, PLACES), strict=True))


@pytest.mark.parametrize("surrounding", surroundings.SURROUNDINGS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_self_test_is_right_and_leaves_no_trace(
    answers: Mapping[layout.Place, Any], place: layout.Place, surrounding: str
) -> None:
    answer = answers[place]
    assert not isinstance(answer, str), answer
    assert not isinstance(answer[surrounding], str), answer[surrounding]
    assert answer[surrounding] == {patch_id: [] for patch_id in PLACES[place]}
