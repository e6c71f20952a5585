"""A pair without a shared prefix keeps both its texts, in the module of each trainer that splits pairs."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates

import tiny

ID = "extract-prompt-negative-index"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = [f"{target.module}:{target.attribute}" for target in gates.targets_here(PATCH)]

HIT = [("Blue it is ", "Green"), ("a ", "b"), ("  ", "cd"), (" ", "ef"), ("Blue ", "Green "), ("gh ", "i h ")]
"""Chosen and rejected texts that differ in the first character."""

ONE_CHARACTER = (" ", "e")
"""TRL splits this pair rightly, by chance."""

SPLIT = {
    ("ab cd", "ab ef"): ("ab", " cd", " ef"),
    ("ab cd ", "ab ef"): ("ab", " cd ", " ef"),
    ("abcd ", "abef"): ("ab", "cd ", "ef"),
    (" ab ", " cd "): ("", " ab ", " cd "),
    ("ab", "cd"): ("", "ab", "cd"),
    ("ab ", "ab cd"): ("ab", " ", " cd"),
    ("ab", "abc"): ("a", "b", "bc"),
    ("ab ", "ab "): ("ab", " ", " "),
}
"""Pairs, and their prompts and answers."""

Split = Callable[..., Any]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def split(target: str) -> Split:
    """Return the function as the trainer's module has it now, with the patch on or off."""
    module, _, attribute = target.partition(":")
    return lambda row: getattr(importlib.import_module(module), attribute)(row)


def pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize("texts", HIT, ids=repr)
def test_a_pair_without_a_shared_prefix_has_an_empty_prompt(texts: tuple[str, str], split: Split, target: str) -> None:
    with tiny.counted(ID, target) as counts:
        assert split(pair(*texts)) == {"prompt": "", **pair(*texts)}
        assert counts().acted == 1


@pytest.mark.parametrize("texts", HIT, ids=repr)
def test_trl_keeps_a_character_of_each(texts: tuple[str, str], split: Split, switch: Any) -> None:
    with switch.off():
        assert split(pair(*texts)) == {"prompt": texts[0][:-1], **pair(" ", texts[1][-1])}


@pytest.mark.parametrize("texts", SPLIT, ids=repr)
def test_other_pairs_are_split_by_trl(texts: tuple[str, str], split: Split, switch: Any, target: str) -> None:
    with tiny.counted(ID, target) as counts:
        parts = split(pair(*texts))
        assert counts().acted == 0
    assert tuple(parts[name] for name in ("prompt", "chosen", "rejected")) == SPLIT[texts]
    with switch.off():
        assert split(pair(*texts)) == parts


def test_a_pair_of_one_character_that_trl_splits_rightly_is_left_alone(split: Split, target: str) -> None:
    with tiny.counted(ID, target) as counts:
        assert split(pair(*ONE_CHARACTER)) == {"prompt": "", **pair(*ONE_CHARACTER)}
        assert counts().acted == 0


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_messages_are_split_by_trl(shared: int, split: Split, target: str) -> None:
    said = [{"role": "user", "content": f"{number} "} for number in range(shared)]
    answers = [[{"role": "assistant", "content": content}] for content in ("a ", "b ")]
    with tiny.counted(ID, target) as counts:
        parts = split(pair(*(said + answer for answer in answers)))
        assert counts().acted == 0
    assert parts == {"prompt": said, **pair(*answers)}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", **pair("a ", "b")},
        {"prompt": "a", "completion": "b ", "label": True},
        {"prompt": [{"role": "user", "content": "p"}], "completion": [{"role": "assistant", "content": "a "}]},
    ],
    ids=["a pair with a prompt", "no pair", "messages that are no pair"],
)
def test_rows_that_need_no_prompt_are_handed_on(row: dict[str, Any], split: Split, target: str) -> None:
    if not target.endswith(":maybe_extract_prompt"):
        pytest.skip("the trainer calls this function for pairs without a prompt only")
    assert split(row) is row


def test_the_row_of_the_user_stays_as_it_is(split: Split) -> None:
    row = pair("a ", "bc")
    before = copy.deepcopy(row)
    split(row)
    assert row == before


@pytest.mark.parametrize("processes", [None, 2])
def test_a_dataset_is_mapped_row_by_row(processes: int | None, target: str) -> None:
    module, _, attribute = target.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    rows = [pair("ab cd", "ab ef"), pair("a ", "bc"), pair("ab", "cd"), pair("d ", "efg")]
    mapped = Dataset.from_list(rows).map(function, num_proc=processes)
    assert mapped["prompt"][:] == ["ab", "", "", ""]
    assert mapped["chosen"][:] == [" cd", "a ", "ab", "d "]
    assert mapped["rejected"][:] == [" ef", "bc", "cd", "efg"]
