from __future__ import annotations

from trl_hotfix.errors import NotAppliedError
from trl_hotfix.model import Decision, Reason, State, Strict
from trl_hotfix.patching.configuration import Configuration, not_applied


def test_nothing_is_selected_before_the_first_apply() -> None:
    configuration = Configuration()
    assert (configuration.selection, configuration.selected, configuration.strict) == (None, set(), Strict.NOTHING)


def test_only_pending_patches_are_selected() -> None:
    decisions = {state.value: Decision(state, Reason.APPLIES) for state in State}
    assert Configuration(decisions=decisions).selected == {"pending"}


def test_the_error_of_strict_mode_has_a_line_for_each_patch() -> None:
    error = not_applied(f"{name}: skipped (unknown-body)" for name in ("one", "two"))
    assert isinstance(error, NotAppliedError)
    assert str(error).splitlines()[1:] == ["  one: skipped (unknown-body)", "  two: skipped (unknown-body)"]
