"""The messages of the errors."""

from __future__ import annotations

import pytest
from helpers.example_entry import with_lines

from trl_hotfix.catalogue import parsing
from trl_hotfix.errors import CatalogueError


def test_a_catalogue_error_has_the_path_and_every_line() -> None:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse(with_lines({2: "  revision: 0", 4: "  severity: bad"}) + "- more\n", "some/patches.yaml")
    message = str(caught.value)
    assert message.startswith("some/patches.yaml has 2 mistakes; no patch was applied:\n  line 4: ")
    assert "\n  line 14: " in message


def test_one_mistake_is_singular() -> None:
    with pytest.raises(CatalogueError, match="has 1 mistake; no patch was applied"):
        parsing.parse("", "patches.yaml")
