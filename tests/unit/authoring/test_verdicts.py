from __future__ import annotations

import pytest

from trl_hotfix.authoring import absent, absent_on, judge
from trl_hotfix.model import Outcome, Verdict


def test_the_right_value_is_fixed_and_the_wrong_reproduced() -> None:
    assert judge(2.0 + 1e-7, right=2.0, wrong=3.0, tokens=4).verdict is Verdict.FIXED
    outcome = judge(3.0, right=2.0, wrong=3.0, tokens=4)
    assert outcome.verdict is Verdict.REPRODUCED
    assert outcome.numbers == {"measured": 3.0, "right": 2.0, "wrong": 3.0, "tokens": 4}


@pytest.mark.parametrize("measured", [2.5, float("nan"), float("inf")])
def test_any_other_value_is_an_error(measured: float) -> None:
    with pytest.raises(AssertionError, match="neither right"):
        judge(measured, right=2.0, wrong=3.0)


def test_a_bug_that_cannot_occur_is_absent_with_a_reason() -> None:
    outcome = absent("no such option")
    assert (outcome.verdict, outcome.numbers) == (Verdict.ABSENT, {"why": "no such option"})


@absent_on(ValueError, "too many values", why="it ends before that")
def self_test(error: Exception | None) -> Outcome:
    if error is not None:
        raise error
    return Outcome(Verdict.FIXED)


def test_a_known_error_means_absent_and_no_other_does() -> None:
    assert self_test(None).verdict is Verdict.FIXED
    assert self_test(ValueError("too many values to unpack")) == absent("it ends before that")
    assert self_test.__name__ == "self_test"
    for error in (ValueError("another"), TypeError("too many values to unpack")):
        with pytest.raises(type(error), match=str(error)):
            self_test(error)
