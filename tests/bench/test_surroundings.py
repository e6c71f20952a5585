"""Self-tests in the surroundings of a job return the same verdicts, and leave no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import sharing

from trl_hotfix.catalogue import loading

import layout
import surroundings
from running import process

SECONDS_A_SURROUNDING = 240


def cover() -> dict[layout.Place, set[str]]:
    """Return the newest release and a few others that together have every patch, with the patches of each."""
    places = layout.places()
    ids_by_place = {
        place: {patch.id for patch in loading.load() if place.targets_with_stack_alone(patch)} for place in places
    }
    chosen = {places[-1]: ids_by_place[places[-1]]}
    while missing := set().union(*ids_by_place.values()) - set().union(*chosen.values()):
        best = max(places, key=lambda place: len(ids_by_place[place] & missing))
        chosen[best] = ids_by_place[best]
    return chosen


PLACES = cover()


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[layout.Place, Any]:
    """Return the answers of each place, by surrounding."""
    names = sharing.by_place((case["place"], case["surrounding"]) for case in sharing.parameters(request))
    layout.build(names)

    def run(place: layout.Place) -> Any:
        command = [str(layout.HERE / "surroundings.py"), "{out}", str(SECONDS_A_SURROUNDING), *names[place]]
        return process(place, command, 360 + SECONDS_A_SURROUNDING * len(names[place]), "deepspeed")

    return sharing.side_by_side(run, names)


CASES = [(place, surrounding) for place in PLACES for surrounding in surroundings.SURROUNDINGS]


@pytest.mark.parametrize(("place", "surrounding"), sharing.heavy(CASES), ids=str)
def test_every_self_test_is_right_and_leaves_no_trace(
    answers: Mapping[layout.Place, Any], place: layout.Place, surrounding: str
) -> None:
    answer = answers[place]
    assert not isinstance(answer, str), answer
    assert not isinstance(answer[surrounding], str), answer[surrounding]
    assert answer[surrounding] == {patch_id: [] for patch_id in PLACES[place]}
