"""``trl-hotfix diff``: what two records of runs, or two freeze files, do not have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.commands import diff
from trl_hotfix.commands.common import Exit
from trl_hotfix.errors import SettingError

A = {"id": "a", "revision": 1, "options": {"x": "y"}, "word": "repaired", "called": 3, "acted": 3}
B = {"id": "b", "revision": 2}


@pytest.fixture
def compare(tmp_path: Path) -> Any:
    def run(first: dict[str, Any], second: dict[str, Any], *options: str) -> Any:
        for name, content in {"first.json": first, "second.json": second}.items():
            (tmp_path / name).write_text(json.dumps({"trl": "0.16.1", "schema": 2, **content}))
        paths = [str(tmp_path / name) for name in ("first.json", "second.json")]
        return CliRunner().invoke(diff.command, [*paths, *options], standalone_mode=False)

    return run


def test_counts_and_words_are_no_other_repairs(compare: Any) -> None:
    other = {**A, "word": "called", "called": 9, "acted": 0}
    result = compare({"patches": [A, B]}, {"patches": [other, B]})
    assert result.return_value is Exit.FINE
    head = "The patches that are on do not differ, with their revisions and options. This does:"
    assert result.output == f"{head}\n  a: word: repaired -> called\n"
    assert compare({"patches": [A, B]}, {"patches": [A, B]}).output == "The repairs are the same.\n"


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"patches": [A]}, "b: patch: r2 -> none\n"),
        ({"patches": [A], "unreached": [{**B, "reason": "not-called"}]}, "b: patch: r2 -> unreached\n"),
        ({"patches": [A, {**B, "revision": 3}]}, "b: revision: 2 -> 3\n"),
        ({"patches": [{**A, "options": {}}, B]}, "a: options: x=y -> none\n"),
        ({"patches": [A, B], "trl": "0.17.0"}, "trl: 0.16.1 -> 0.17.0\n"),
        ({"patches": [A, B], "packs": {"p": "p==1.0"}}, "pack p: none -> p==1.0\n"),
    ],
)
def test_each_difference_is_named(compare: Any, second: dict[str, Any], expected: str) -> None:
    result = compare({"patches": [A, B]}, second)
    assert result.return_value is Exit.DEGRADED
    assert result.output == f"The repairs are not the same:\n  {expected}"


def test_a_freeze_file_has_no_words(compare: Any) -> None:
    frozen = {"id": "a", "revision": 1, "options": {"x": "y"}}
    answer = json.loads(compare({"patches": [A]}, {"patches": [frozen]}, "--json").output)
    assert list(answer) == list(diff.Answer.__annotations__)
    assert (answer["same_repairs"], answer["differences"]) == (True, [])


def test_folders_of_runs_are_what_status_takes(tmp_path: Path) -> None:
    runs = [tmp_path / "first", tmp_path / "second" / "checkpoint-20"]
    for folder in runs:
        folder.mkdir(parents=True)
        (folder / "trl_hotfix.json").write_text(json.dumps({"trl": "0.16.1", "patches": [A]}))

    def run() -> Any:
        paths = [str(runs[0]), str(runs[1].parent), "--json"]
        return CliRunner().invoke(diff.command, paths, standalone_mode=False)

    answer = json.loads(run().output)
    assert (answer["first"], answer["second"]) == tuple(str(folder / "trl_hotfix.json") for folder in runs)
    assert answer["same_repairs"]
    (runs[0] / "trl_hotfix.rank-3.json").write_text("{}")
    (difference,) = json.loads(run().output)["differences"]
    assert (difference["what"], difference["first"]) == ("ranks with a record of their own", "3")
    (runs[0] / "trl_hotfix.json").unlink()
    (runs[0] / "trl_hotfix.rank-3.json").unlink()
    assert "has no trl_hotfix.json, and no checkpoint with one" in run().exception.format_message()


def test_a_file_that_is_no_record_is_one_clear_error(compare: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be used"):
        raise compare({"patches": 1}, {"patches": []}).exception
