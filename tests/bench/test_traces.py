"""The self-tests leave no trace in a user's process: no seed on any device, and no line on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers import sharing

CASES = [
    (release, f"{kind}, {mode}")
    for release in ("0.11.4", "0.19.1", "0.29.1", "1.16.0")
    for kind in ("queued", "initialised")
    for mode in ("apply", "observe")
]
SMOKE = [("0.11.4", "queued, apply")]
Answers = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return the answers of each release, by case."""
    return sharing.answers_by_release(request, lambda release: ["-m", "bench.inside.traces", "{out}"], 900)


@pytest.mark.parametrize(("release", "case"), sharing.heavy(CASES, smoke=SMOKE))
def test_the_self_tests_leave_no_trace(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    assert answer["tests"] > 5
    assert answer["changed"] == []
    assert answer["written"] == ""
