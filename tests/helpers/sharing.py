"""The processes of heavy tests: one for all selected tests of a file in one place, which share its import of TRL.

A fixture of module scope asks ``parameters`` for what its selected tests need, and runs nothing else. So a shard of the
matrix costs its share, and ``pytest -k`` what it selects. Workers of pytest-xdist need ``--dist loadfile``: otherwise
each of them answers for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

Place = TypeVar("Place")
Case = TypeVar("Case")
Answer = TypeVar("Answer")


def heavy(values: Iterable[Any], smoke: Container[Any] = ()) -> list[Any]:
    """Return the values with the mark ``matrix``. Those in ``smoke`` stay unmarked: ``make test`` runs them."""
    return [
        value
        if value in smoke
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.matrix)
        for value in values
    ]


def parameters(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    """Return the parameters of each selected test that uses the fixture of ``request``, which has module scope."""
    return [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.getparent(pytest.Module) is request.node
        and request.fixturename in item.fixturenames
    ]


def by_place(cases: Iterable[tuple[Place, Case]]) -> dict[Place, list[Case]]:
    """Return the distinct cases of each place."""
    grouped: dict[Place, list[Case]] = {}
    for place, case in dict.fromkeys(cases):
        grouped.setdefault(place, []).append(case)
    return grouped


def answers_by_release(
    request: pytest.FixtureRequest, arguments: Callable[[str], list[str]], seconds: float
) -> dict[str, Any]:
    """Return the answers to the cases of the selected tests, by release: each runs these arguments and its cases."""
    from bench.proving.running import process
    from bench.releases import layout

    cases = by_place((case["release"], case["case"]) for case in parameters(request))
    places = {release: layout.main_place(release) for release in cases}
    layout.build(places.values())

    def run(release: str) -> Any:
        return process(places[release], [*arguments(release), *cases[release]], seconds)

    return side_by_side(run, cases)


def answer_of(answers: Mapping[str, Any], release: str, case: str) -> Any:
    """Return the answer to one case. A text in its place is the reason why there is none."""
    assert not isinstance(answers[release], str), answers[release]
    answer = answers[release][case]
    assert not isinstance(answer, str), answer
    return answer


def side_by_side(run: Callable[[Place], Answer], places: Iterable[Place]) -> dict[Place, Answer]:
    """Return the answer for each place. The workers of pytest-xdist together use each core once."""
    places = list(places)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // workers)) as pool:
        return dict(zip(places, pool.map(run, places), strict=True))
