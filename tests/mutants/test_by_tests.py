"""The tests of a patch notice mutants, and reach lines, that nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trl_hotfix.catalogue import loading

import mutants

ID = "transformers-gradients-times-gas"
LINE = "return divides and not _is_multiplied_before()"
WRONG = f"_is_divided_later: `{LINE}` -> `{LINE.replace('not', '')}`"
"""Only a run under DeepSpeed tells the difference."""


@pytest.fixture(scope="module")
def patch() -> Any:
    return next(patch for patch in loading.load() if patch.id == ID)


@pytest.fixture(scope="module")
def answer(patch: Any) -> Mapping[str, Any]:
    code = {**mutants.sources_of(patch), "nothing changes": mutants.source_of(patch)}
    found = mutants.run_by_tests(patch, [WRONG, "constant", "nothing changes"], code)
    assert not isinstance(found, str), found
    return found


def test_a_mutant_in_the_code_and_a_breakage_are_noticed(answer: Mapping[str, Any]) -> None:
    assert {name: answer[name]["killer"] for name in (WRONG, "constant")} == {WRONG: "tests", "constant": "tests"}


def test_the_same_code_is_no_mutant(answer: Mapping[str, Any]) -> None:
    assert answer["nothing changes"]["killer"] == ""


def test_what_the_tests_reach_is_counted(answer: Mapping[str, Any]) -> None:
    reached = answer[""]["reached"]
    assert reached["missing"] == []
    assert any(name.startswith("take_the_mean_of_the_micro_batches.compute_share: ") for name in reached["executed"])
