"""The conditions of ``when``: each holds for an argument, does not hold, or is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_hotfix.catalogue import conditions
from trl_hotfix.catalogue.conditions import Argument, Kind


@pytest.mark.parametrize(
    ("condition", "value", "answer"),
    [
        (True, True, True),
        (True, False, False),
        ("sft", ["sigmoid", "sft"], True),
        ("sft", ["sigmoid"], False),
        (">1", 2, True),
        (">1", 1, False),
        (">1", "1e3", True),
        (">1", "many", False),
        ("!=text", "text", False),
        ("!=text", "content", True),
        ("!=0", 0.0, False),
        ("set", 0, True),
        ("set", None, False),
        ("unset", None, True),
        (None, None, True),
        (None, 1, False),
        ("text", "a", True),
        ("object", "a", False),
        (["unset", ">3"], 4, True),
        (["unset", ">3"], 3, False),
        ("by *peft*", "peft", False),
        ("!=@other", 3, True),
        ("!=@other", 2, False),
    ],
)
def test_a_condition_holds_for_a_literal_or_not(condition: Any, value: Any, answer: bool) -> None:
    assert conditions.validation_error(condition) is None
    literal = Argument(Kind.LITERAL, value)
    assert conditions.evaluate(condition, literal, lambda name: Argument(Kind.LITERAL, {"other": 2}[name])) is answer


@pytest.mark.parametrize(
    ("condition", "unset", "model", "incomplete"),
    [
        ("set", False, True, True),
        ("unset", True, False, False),
        ("object", False, True, True),
        ("text", False, False, False),
        ("by *peft*", False, True, None),
        ("not by *peft*", False, False, None),
        ("by Other, get_*", False, False, None),
        (True, False, None, None),
        (None, False, False, False),
        (">1", False, None, None),
        (["unset", True], True, None, None),
    ],
)
def test_conditions_of_unset_arguments_and_of_objects(
    condition: Any, unset: bool, model: bool | None, incomplete: bool | None
) -> None:
    arguments = [
        Argument(Kind.UNSET),
        Argument(Kind.OBJECT, made_by=("peft.PeftModel.from_pretrained",)),
        Argument(Kind.OBJECT, made_by=("Mine",), complete=False),
    ]
    answers = [conditions.evaluate(condition, argument, lambda _: arguments[0]) for argument in arguments]
    assert answers == [unset, model, incomplete]
    assert conditions.evaluate(condition, Argument(Kind.UNKNOWN), lambda _: arguments[0]) is None


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
SCALARS_AND_LISTS = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
ARGUMENTS = st.builds(Argument, st.sampled_from(Kind), SCALARS_AND_LISTS, made_by=st.just(("a.B",)))


@given(SCALARS_AND_LISTS, ARGUMENTS, ARGUMENTS)
@settings(deadline=None)
def test_every_valid_condition_has_an_answer(condition: Any, argument: Argument, other: Argument) -> None:
    if conditions.validation_error(condition) is None:
        assert conditions.evaluate(condition, argument, lambda _: other) in (True, False, None)
