"""What is said to be reached was reached."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from bench.mutants import covered

SOURCE = """
def wrapper(value):
    if value > 0:
        return helper(value)
    return 0


def helper(value):
    return value if value else None


def self_test():
    return 1
"""


@pytest.fixture
def module(tmp_path: Path) -> Any:
    file = tmp_path / "patch_like.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("patch_like", file)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def reached(module: Any, *values: int) -> Any:
    return covered.reached(module, {"wrapper", "helper"}, lambda: [module.wrapper(value) for value in values])


def test_what_is_not_reached_is_missing(module: Any) -> None:
    assert reached(module, 1)["missing"] == ["wrapper: 3 -> 5", "wrapper: 5"]
    assert reached(module, -1)["missing"] == ["wrapper: 3 -> 4", "wrapper: 4", "helper: 9"]


def test_nothing_is_missing_where_all_is_reached(module: Any) -> None:
    answer = reached(module, 1, -1)
    assert answer["missing"] == []
    assert answer["executed"] == [
        "wrapper: 3 -> 4",
        "wrapper: 3 -> 5",
        "wrapper: 3",
        "wrapper: 4",
        "wrapper: 5",
        "helper: 9",
    ]


def test_what_one_place_reaches_is_not_missed(module: Any) -> None:
    assert covered.together([reached(module, 1), reached(module, -1)]) == {"total": 6, "missed": []}
    assert covered.together([reached(module, 1)]) == {"total": 6, "missed": ["wrapper: 3 -> 5", "wrapper: 5"]}


def test_an_error_is_not_hidden(module: Any) -> None:
    with pytest.raises(TypeError):
        covered.reached(module, {"wrapper"}, lambda: module.wrapper("not a number"))
