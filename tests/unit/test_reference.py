"""What the reference says of the program is what the program says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from trl_hotfix.model import Reason, State

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
STATES = REFERENCE.partition("## States and reasons")[2].partition("\n## ")[0]


@pytest.mark.parametrize("word", [*State, *Reason], ids=lambda word: word.value)
def test_every_state_and_reason_is_explained(word: State | Reason) -> None:
    assert f"`{word.value}`" in STATES
