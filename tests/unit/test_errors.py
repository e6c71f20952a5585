"""The messages of the errors."""

from __future__ import annotations

import pytest
from helpers.example_entry import with_lines

from trl_hotfix.catalogue import parsing
from trl_hotfix.errors import CatalogueError, UnknownPatchError, quoted


def test_a_catalogue_error_has_the_path_and_every_line() -> None:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse(with_lines({2: "  revision: 0", 4: "  severity: bad"}) + "- more\n", "some/patches.yaml")
    message = str(caught.value)
    assert message.startswith("some/patches.yaml has 2 mistakes; no patch was applied:\n  line 4: ")
    assert "\n  line 14: " in message


def test_a_long_name_is_cut_in_a_message() -> None:
    message = str(UnknownPatchError(["x" * 100_000, "some-pach"], ["some-patch"], "TRL_HOTFIX_ONLY"))
    assert f"'{'x' * 80}'... (100000 characters)" in message
    assert "'some-pach'; did you mean 'some-patch'?" in message
    assert len(message) < 300
    assert (quoted("short"), quoted(1)) == ("'short'", "1")


def test_one_mistake_is_singular() -> None:
    with pytest.raises(CatalogueError, match="has 1 mistake; no patch was applied"):
        parsing.parse("", "patches.yaml")
