"""YAML is refused where it is invalid, or uses more than plain mappings, lists and scalars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.example_entry import ENTRY, mistakes, the_mistake, with_lines


def test_invalid_yaml_is_named_with_its_line() -> None:
    line, message = the_mistake(with_lines({6: "  upstream: {issue: 1"}))
    assert line in (6, 7)
    assert message.startswith("not YAML: ")


def test_a_control_character_is_a_mistake() -> None:
    assert the_mistake("- \x00")[1].startswith("not YAML: ")


def test_a_second_document_is_a_mistake() -> None:
    assert the_mistake("[]\n---\n[]\n")[0] == 2


def test_a_duplicate_key_is_named_with_both_lines() -> None:
    assert the_mistake(ENTRY + "  title: Another\n") == (14, "duplicate key 'title', first used on line 3")


def test_a_key_that_is_not_text_is_a_mistake() -> None:
    line, message = the_mistake(ENTRY + "  on: 1\n")
    assert line == 14
    assert message.startswith("expected a name as the key")


def test_endless_brackets_are_a_mistake_and_no_crash() -> None:
    code = (
        "from trl_hotfix.catalogue import parsing\n"
        "from trl_hotfix.errors import CatalogueError\n"
        "try:\n    parsing.parse('[' * 100_000, 'patches.yaml')\n"
        "except CatalogueError:\n    print('refused')\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout.strip()) == (0, "refused")


# Aliases


def test_an_alias_is_refused() -> None:
    line, message = mistakes(with_lines({7: "  why: &text because", 8: "  how: *text"}))[0]
    assert line == 8
    assert "alias" in message


def test_an_alias_to_nothing_is_refused() -> None:
    line, message = the_mistake(with_lines({8: "  how: *text"}))
    assert line == 8
    assert message.startswith("an alias (*text)")


def test_a_recursive_alias_is_refused() -> None:
    assert any("alias" in message for _, message in mistakes("&a [*a]"))


def test_a_merge_key_is_refused() -> None:
    assert any(line == 14 for line, _ in mistakes(ENTRY + "  <<: {default: off}\n"))


# Tags


@pytest.mark.parametrize(
    "value",
    [
        "!!python/name:os.system ''",
        "!!python/module:os ''",
        "!!python/object/apply:os.system ''",
        "!unknown x",
    ],
)
def test_a_tag_on_text_is_refused(value: str) -> None:
    refused = mistakes(with_lines({3: f"  title: {value}"}))
    assert any(line == 3 and message.startswith("a tag (") for line, message in refused)


def test_a_tag_that_calls_a_function_calls_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    call = f"!!python/object/apply:os.mkdir [{json.dumps(str(folder))}]"
    refused = mistakes(with_lines({3: f"  title: {call}"}))
    assert {line for line, _ in refused} == {3}
    assert not folder.exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.getcwd", "!!python/tuple", "!!set", "!unknown"])
def test_a_tag_on_a_list_is_refused(tag: str) -> None:
    assert 9 in [line for line, _ in mistakes(with_lines({9: f"  targets: {tag}"}))]


def test_a_tag_on_an_entry_is_refused() -> None:
    assert mistakes(ENTRY.replace("- id", "- !!python/object:os.PathLike\n  id"))


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp soon", "!!int ''", "!!float ''", "!!int x"])
def test_a_value_that_contradicts_its_tag_is_a_mistake(value: str) -> None:
    assert 3 in [line for line, _ in mistakes(with_lines({3: f"  title: {value}"}))]


@pytest.mark.parametrize("value", ["!!pairs x", "!!seq x", "!!omap x", "!!map x"])
def test_text_with_the_tag_of_a_collection_is_a_mistake(value: str) -> None:
    assert {line for line, _ in mistakes(value)} == {1}
