"""What the relations say of a new release that they did not say of the one before."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.relations.ledger import Finding

from bench.relations.compared import NOT_THERE, Comparison, compared
from bench.relations.compared_report import markdown
from bench.releases import layout

BEFORE, PLACE = (layout.main_place(release) for release in ("1.15.0", "1.16.0"))
OPEN = Finding("padding", ("SFT",), ("loss",), "It is so.", trl=">=1.0", new="a-bug")


def answer(place: object, state: str, *what: str, relation: str = "padding", why: str = "") -> dict[str, Any]:
    differences = [{"what": each, "left": 1.0, "right": 2.0, "apart": 0.5} for each in what]
    cell = {"trainer": "SFT", "relation": relation, "setting": "a = b", "state": state, "why": why}
    return {
        "place": str(place),
        "on": True,
        "cell": {**cell, "differences": differences},
        "seconds": 1.5,
        "ran": str(BEFORE),
    }


def comparison(before: Any, now: Any, *findings: Finding) -> Comparison:
    """Compare the answers to one claim: a state, and what is violated. None: the release lacks it."""
    answers = [answer(place, *each) for place, each in ((BEFORE, before), (PLACE, now)) if each is not None]
    return compared(answers, BEFORE, PLACE, findings)


@pytest.mark.parametrize(
    ("before", "was"),
    [(("holds",), "holds"), (("cannot be asked",), "cannot be asked"), (("error",), "error"), (None, NOT_THERE)],
)
def test_a_violation_is_new_unless_the_release_before_has_it(before: Any, was: str) -> None:
    found = comparison(before, ("violated", "loss of step 1"))
    assert [(one.name, one.was, one.what, one.cause) for one in found.violations] == [
        (("SFT", "padding", "a = b"), was, "loss of step 1", None)
    ]
    assert list(found.for_a_person) == ["relations: padding of SFT is violated, without a cause in the ledger: 1 claim"]


def test_another_difference_in_a_violated_claim_is_new_and_another_step_of_the_same_is_not() -> None:
    found = comparison(("violated", "loss of step 1"), ("violated", "loss of step 2", "kl of step 1"))
    assert [(one.was, one.what) for one in found.violations] == [("violated", "kl of step 1")]


def test_a_violation_with_a_cause_is_named_and_needs_no_person() -> None:
    found = comparison(("holds",), ("violated", "loss of step 1"), OPEN)
    assert [one.cause for one in found.violations] == ["new a-bug"]
    assert list(found.for_a_person) == []


def test_what_holds_now_is_gone_and_the_range_of_its_finding_is_to_be_ended() -> None:
    found = comparison(("violated", "loss of step 1"), ("holds",), OPEN)
    assert [one.was for one in found.gone] == ["violated"]
    assert found.ended == (OPEN,)
    assert list(found.for_a_person) == ["relations: padding of SFT, new a-bug: it is not seen in 1.16.0; end its range"]


def test_a_finding_that_the_release_before_lacks_too_is_not_of_this_release() -> None:
    assert comparison(("holds",), ("holds",), OPEN).ended == ()


@pytest.mark.parametrize("now", [("cannot be asked",), None])
def test_what_was_asked_and_cannot_be_asked_now_is_given(now: Any) -> None:
    assert [one.was for one in comparison(("holds",), now).unasked] == ["holds"]
    assert comparison(("cannot be asked",), now).unasked == ()


def test_an_error_is_new_where_the_run_of_the_release_before_had_none() -> None:
    failed = answer(PLACE, "error", why="IndexError: list index")
    for state, news in (("holds", 1), ("error", 0)):
        found = compared([answer(BEFORE, state), failed], BEFORE, PLACE, [])
        assert [one.what for one in found.errors] == ["IndexError: list index"] * news
        assert len(list(found.for_a_person)) == news


def test_the_section_counts_both_releases_and_names_each_claim_once() -> None:
    answers = [
        answer(BEFORE, "holds"),
        answer(BEFORE, "violated", "kl of step 1", relation="order"),
        answer(PLACE, "violated", "loss of step 1", "loss | kl of step 1"),
        answer(PLACE, "holds", relation="order"),
    ]
    text = "\n".join(markdown(compared(answers, BEFORE, PLACE, [])))
    assert f"| {BEFORE} | 2 | 1 | 1 | 0 | 0 | 2 | 3 |" in text
    assert f"| {PLACE} | 2 | 1 | 1 | 0 | 0 | 0 | 3 |" in text
    assert "| SFT | padding | `a = b` | holds | loss of step 1: 1 and 2; 1 more | no cause |" in text
    assert "### Violated before, and holds now" in text
    assert "| SFT | order | `a = b` | violated |  |" in text
    assert "cannot be asked now" not in text
