"""Self-tests in the middle of a job: they answer the same, and leave no trace."""

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
    """A few releases that together have every patch, the one with the most first, and the newest."""
    places = layout.places()
    has = {place: {each.id for each in loading.load() if place.targets_of(each)} for place in places}
    chosen = {places[-1]: has[places[-1]]}
    while left := set().union(*has.values()) - set().union(*chosen.values()):
        most = max(places, key=lambda place: len(has[place] & left))
        chosen[most] = has[most]
    return chosen


PLACES = cover()


@pytest.fixture(scope="session")
def found(everywhere: None) -> Mapping[layout.Place, Any]:
    bench = Bench(1, True, Console(quiet=True))

    def run(place: layout.Place) -> Any:
        return bench.process(place, [str(HERE / "surroundings.py"), "{out}"], 600, "deepspeed")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(PLACES, pool.map(run, PLACES), strict=True))


@pytest.mark.parametrize("surrounding", surroundings.SURROUNDINGS)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_self_test_is_right_and_leaves_no_trace(
    found: Mapping[layout.Place, Any], place: layout.Place, surrounding: str
) -> None:
    answer = found[place]
    assert not isinstance(answer, str), answer
    assert not isinstance(answer[surrounding], str), answer[surrounding]
    assert answer[surrounding] == {patch_id: [] for patch_id in PLACES[place]}
