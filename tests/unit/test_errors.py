"""The messages of the errors."""

from __future__ import annotations

import pickle

import pytest

from trl_hotfix import errors
from trl_hotfix.catalogue import parsing
from trl_hotfix.errors import (
    CatalogueError,
    DamagedError,
    HotfixError,
    Mistake,
    SettingError,
    UnknownPatchError,
    quoted,
)

from helpers.example_entry import with_lines


def test_a_catalogue_error_has_the_path_and_every_line() -> None:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse(with_lines({2: "  revision: 0", 4: "  severity: bad"}) + "- more\n", "some/patches.yaml")
    message = str(caught.value)
    assert message.startswith("some/patches.yaml has 2 mistakes; no patch was applied:\n  line 4: ")
    assert "\n  line 14: " in message


def test_a_long_name_is_cut_in_a_message() -> None:
    message = str(UnknownPatchError(["x" * 100_000, "some-pach"], ["some-patch"], "TRL_HOTFIX_ONLY"))
    assert f"'{'x' * 80}'... (99920 more)" in message
    assert "'some-pach'; did you mean 'some-patch'?" in message
    assert len(message) < 300
    assert (quoted("short"), quoted(1)) == ("'short'", "1")


def test_one_mistake_is_singular() -> None:
    with pytest.raises(CatalogueError, match="has 1 mistake; no patch was applied"):
        parsing.parse("", "patches.yaml")


@pytest.mark.parametrize(
    "error",
    [
        UnknownPatchError(["some-pach"], ["some-patch"], "skip="),
        CatalogueError("patches.yaml", [Mistake(3, "wrong")]),
        DamagedError("patches.json", OSError("gone")),
        SettingError("wrong"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_between_processes(error: HotfixError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_what_the_user_asked_for_stops_the_import_and_what_is_ours_does_not() -> None:
    stopping = {kind for kind in vars(errors).values() if getattr(kind, "stops_import", False)}
    assert stopping == {errors.PackError, errors.SettingError, errors.UnknownPatchError}
