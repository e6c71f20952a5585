"""A patch in words: the bug, the repair, its state and how to do without it."""

from __future__ import annotations

from typing import Any

import pytest

import trl_hotfix

from helpers.made_up_patches import is_marked, mark


def test_explain_shows_the_state_and_how_to_turn_it_off(declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    text = trl_hotfix.explain("made-up")
    assert "applied (proven)" in text
    assert "TRL_HOTFIX_SKIP=made-up" in text
    with pytest.raises(trl_hotfix.UnknownPatchError):
        trl_hotfix.explain("made-upp")


def test_a_target_has_the_moment_at_which_it_is_called() -> None:
    lines = trl_hotfix.explain("dpo-precomputed-ref-logps-ignored").splitlines()
    (line,) = (line for line in lines if line.startswith("target "))
    assert line.endswith(", called: step)")
