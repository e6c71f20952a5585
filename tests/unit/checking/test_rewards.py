from __future__ import annotations

import itertools
from typing import Any

import pytest

from trl_hotfix.checking.rewards import Rewards

COMPLETIONS = ["one", "three", "fourteen"]


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def flat(completions: list[str], **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def fails(completions: list[str], **kwargs: Any) -> list[float]:
    raise ConnectionError("no judge")


NUMBERS = itertools.count()


def changing(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(next(NUMBERS)) for _ in completions]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (flat, "gives every completion the same"),
        (fails, "fails: ConnectionError: no judge"),
        (changing, "answers twice differently"),
    ],
)
def test_problem(function: Any, why: str) -> None:
    rewards = Rewards(())
    (wrapped,) = rewards.wrapped([function])
    wrapped(completions=COMPLETIONS)
    assert rewards.problems() == {0: (function.__name__, why)}
    assert wrapped.__name__ == function.__name__


def test_one_that_says_something_stays() -> None:
    rewards = Rewards(())
    both = rewards.wrapped([length, flat])
    assert [each(completions=COMPLETIONS) for each in both] == [[3.0, 5.0, 8.0], [0.0, 0.0, 0.0]]
    assert rewards.problems() == {}


def test_a_stand_in_depends_on_the_text_alone() -> None:
    (wrapped,) = Rewards((0,)).wrapped([flat])
    first = wrapped(completions=COMPLETIONS)
    assert len(set(first)) == 3
    assert wrapped(completions=COMPLETIONS[::-1]) == first[::-1]
