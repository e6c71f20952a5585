"""Self-tests in the surroundings of a job return the same verdicts, and leave no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.inside import surroundings
from bench.proving import covering
from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

SECONDS_A_SURROUNDING = 240


PLACES = covering.of_surroundings()


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[layout.Place, Any]:
    """Return the answers of each place, by surrounding."""
    names = sharing.by_place((case["place"], case["surrounding"]) for case in sharing.parameters(request))
    layout.build(names)

    def run(place: layout.Place) -> Any:
        command = ["-m", "bench.inside.surroundings", "{out}", str(SECONDS_A_SURROUNDING), *names[place]]
        return process(place, command, 360 + SECONDS_A_SURROUNDING * len(names[place]), covering.SURROUNDINGS_OVERLAY)

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
