"""The page of what the relations found: what it counts, and whose it says that the rest is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Severity
from trl_hotfix.relations import ledger
from trl_hotfix.relations.ledger import Finding

from bench.relations import record
from bench.relations.ledger import without_cause
from tools.pages import relation_pages

DIFFERENCE = {"what": "loss of step 1", "left": 4.0, "right": 8.0, "apart": 0.5}


def answer(state: str, *, relation: str = "padding", place: str = "1.16.0@tf4.57", **of_cell: Any) -> dict[str, Any]:
    cell = {"trainer": "SFT", "relation": relation, "setting": "a = b", "state": state, "why": "", "differences": []}
    return {"place": place, "on": True, "cell": {**cell, **of_cell}}


VIOLATED = answer("violated", differences=[DIFFERENCE])


def page(*answers: dict[str, Any], **cause: str) -> str:
    """Return the page of answers and of one finding with this cause, on one line where lines are broken."""
    findings = [Finding("padding", ("SFT",), ("loss",), "It is so.", **cause)] if cause else []  # type: ignore[arg-type]
    return relation_pages.page(answers, findings)


def test_the_table_of_a_release_counts_what_was_asked() -> None:
    unasked = answer("cannot be asked", relation="order", why="ValueError: no. Use another.")
    found = page(answer("holds", relation="resume"), answer("holds"), VIOLATED, unasked)
    rows = dict(re.findall(r"^\| (\w+) \| <span class=\"\w+\">(.*?)</span> \|$", found, re.MULTILINE))
    assert (rows["padding"], rows["resume"], rows["order"]) == ("1 of 2", "1 hold", "not asked")
    assert "2 of 3 claims hold" in found
    assert "| ValueError: no | SFT | 1.16.0 |" in found


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ({"known": "a-bug"}, "known bug: [`a-bug`](bugs/a-bug.md)"),
        ({"meant": "trl/a.py:1"}, "TRL means it: `trl/a.py:1`"),
        ({"new": "a-bug"}, "new bug: `a-bug`"),
        ({"patch": "a-patch"}, "**no cause yet**"),
        ({}, "**no cause yet**"),
    ],
    ids=str,
)
def test_a_violation_says_by_how_much_and_whose_it_is(cause: dict[str, str], said: str) -> None:
    row = f"| padding of SFT<br>`a = b` | loss of step 1: 4 and 8 (50\u00a0%) | {said} |"
    found = page(VIOLATED, **cause)
    assert row in found
    assert ("1 without a cause" in found) == ("no cause" in said)


def test_a_number_of_one_run_alone_and_an_effect_have_no_share() -> None:
    alone = answer("violated", differences=[{**DIFFERENCE, "right": None}])
    effect = {"what": "argument seed: 1 became 2", "left": 0.0, "right": 1.0, "apart": None}
    found = page(alone, answer("violated", differences=[effect]))
    assert "| loss of step 1: 4 and none |" in found
    assert "| argument seed: 1 became 2 |" in found


def test_a_run_that_failed_is_a_violation_with_its_error() -> None:
    found = page(answer("error", why="IndexError: none (a.py:1)"))
    assert "0 of 1 claims hold" in found
    assert "| IndexError: none (a.py:1) | **no cause yet** |" in found


def test_the_newest_release_is_first_and_an_older_one_names_only_what_has_no_cause() -> None:
    older = answer("violated", differences=[DIFFERENCE], setting="of the older", place="1.9.0@tf4.57")
    known = page(older, VIOLATED, new="a-bug")
    assert re.findall("^## TRL (.*)$", known, re.MULTILINE) == ["1.16.0", "1.9.0"]
    assert "of the older" not in known
    assert "of the older" in page(older, VIOLATED)


def test_a_release_that_ran_only_without_the_patches_is_not_there() -> None:
    assert "No release is on record." in page({**VIOLATED, "on": False})


def test_each_violation_on_record_has_a_cause_or_is_listed_without_one() -> None:
    answers = [one for one in record.read_all() if one["on"]]
    found = relation_pages.page(answers, ledger.load())
    rows = re.findall(r"^\| (\w+) of (\S+)<br>`(.*?)` \|.*\*\*no cause yet\*\*", found, re.MULTILINE)
    without = {(one.relation, one.trainer, one.setting) for one in without_cause(answers, ledger.load())}
    assert set(rows) == without


def test_the_page_counts_the_bugs_that_the_relations_find() -> None:
    first, second, *_ = (patch for patch in loading.load() if patch.severity is Severity.WRONG_GRADIENT)
    finding = Finding("padding", ("SFT",), ("loss",), "It is so.", patch=second.id)
    found = relation_pages.page([VIOLATED], [finding], [first, second])
    assert "has 2 bugs of gradients" in found
    assert "and find 1 in the releases" in found
    assert f"| [`{second.id}`](bugs/{second.id}.md) | padding of SFT |" in found
    assert f"[`{first.id}`]" not in found
