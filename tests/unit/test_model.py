"""The shared types."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from trl_hotfix.model import Option, Reason, State

from helpers.patch_examples import PATCH

OVER = Option({"sequence": "the paper's", "global": "every token"}, "sequence")


def test_every_choice_begins_with_the_defaults() -> None:
    two_options = replace(
        PATCH, options={"over": Option(OVER.choices, "global"), "tail": Option(OVER.choices, "sequence")}
    )
    combinations = two_options.every_choice()
    assert combinations[0] == {"over": "global", "tail": "sequence"}
    assert len(combinations) == 4
    assert all(combinations.count(choices) == 1 for choices in combinations)
    assert PATCH.every_choice() == [{}]


REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
STATES = REFERENCE.partition("## States and reasons")[2].partition("\n## ")[0]


@pytest.mark.parametrize("word", [*State, *Reason], ids=lambda word: word.value)
def test_the_reference_explains_every_state_and_reason(word: State | Reason) -> None:
    assert f"`{word.value}`" in STATES
