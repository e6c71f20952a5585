"""Chosen and rejected rows alternate, no prompt comes after itself, and the values of a row stay together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from trl import data_utils

from trl_hotfix.testing import stream

Row = dict[str, Any]
Columns = dict[str, list[Any]]


def pairs(number: int) -> Columns:
    """Return so many pairs. The completions of pair 3 are ``c3`` and ``r3``."""
    return {name: [f"{name[0]}{pair}" for pair in range(number)] for name in ("prompt", "chosen", "rejected")}


def numbered(number: int) -> Columns:
    """Return so many pairs with a further column, which has their numbers. Up to 1.6 TRL leaves it out."""
    return {**pairs(number), "number": [str(pair) for pair in range(number)]}


def rows_of(columns: Mapping[str, list[Any]]) -> list[Row]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def completions_of(rows: Any) -> list[str]:
    """Return the completions in their order. Each has its label, its prompt, and the number of its pair."""
    for row in rows:
        pair = row["completion"][1:]
        assert row["label"] is row["completion"].startswith("c")
        assert row["prompt"] == f"p{pair}"
        assert row.get("number", pair) == pair
    return [row["completion"] for row in rows]


ORDERS = {
    0: "",
    1: "c0 r0",
    2: "c0 c1 r0 r1",
    3: "c0 r2 c1 r0 c2 r1",
    4: "c0 r2 c1 r3 c2 r0 c3 r1",
    7: "c0 r2 c1 r3 c2 r4 c3 r5 c4 r6 c5 r0 c6 r1",
}


@pytest.mark.parametrize("number", ORDERS)
def test_the_rejected_row_of_the_pair_after_the_next_comes_after_a_chosen_one(number: int) -> None:
    columns = numbered(number)
    assert completions_of(rows_of(data_utils._unpair_row(columns))) == ORDERS[number].split()


def test_trl_puts_the_chosen_rows_before_the_rejected_ones(switch: Any) -> None:
    with switch.off():
        unpaired = completions_of(rows_of(data_utils._unpair_row(pairs(4))))
    assert unpaired == ["c0", "c1", "c2", "c3", "r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("number", ORDERS)
def test_the_rows_are_those_of_trl(number: int, switch: Any) -> None:
    columns = numbered(number)
    patched = data_utils._unpair_row(columns)
    with switch.off():
        expected = data_utils._unpair_row(columns)
    assert list(patched) == list(expected)
    assert sorted(rows_of(patched), key=str) == sorted(rows_of(expected), key=str)


@pytest.mark.parametrize("number", [1, 4])
def test_a_dataset_may_have_no_prompts(number: int) -> None:
    columns = pairs(number)
    del columns["prompt"]
    unpaired = data_utils._unpair_row(columns)
    assert list(unpaired) == ["completion", "label"]
    assert unpaired["completion"] == ORDERS[number].split()
    assert unpaired["label"] == [text.startswith("c") for text in unpaired["completion"]]


def test_messages_stay_together() -> None:
    columns = pairs(3)
    of_messages = {name: [[{"role": "user", "content": text}] for text in columns[name]] for name in columns}
    completions = data_utils._unpair_row(of_messages)["completion"]
    assert completions == [[{"role": "user", "content": text}] for text in ORDERS[3].split()]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_no_batch_a_prompt_comes_after_itself(size: int) -> None:
    # KTO gives each prompt the completion of the row before, and the first of a batch that of the last.
    prompts = data_utils._unpair_row(pairs(12))["prompt"]
    for begin in range(0, len(prompts), size):
        batch = prompts[begin : begin + size]
        assert all(prompt != before for before, prompt in zip([batch[-1], *batch], batch, strict=False))


@pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["dataset", "stream"])
@pytest.mark.parametrize("name", ["unpair_preference_dataset", "maybe_unpair_preference_dataset"])
def test_the_kinds_of_a_dataset_alternate(make: Any, name: str) -> None:
    unpaired = getattr(data_utils, name)(make(rows_of(pairs(7))))
    assert completions_of(unpaired) == ORDERS[7].split()


def test_each_dataset_of_several_is_unpaired_by_itself() -> None:
    several = DatasetDict({str(number): Dataset.from_list(rows_of(pairs(number))) for number in (3, 7)})
    unpaired = data_utils.maybe_unpair_preference_dataset(several)
    assert {name: completions_of(rows) for name, rows in unpaired.items()} == {
        name: ORDERS[int(name)].split() for name in ("3", "7")
    }


def test_the_blocks_of_a_large_dataset_alternate_each_by_itself() -> None:
    unpaired = completions_of(data_utils.unpair_preference_dataset(Dataset.from_list(rows_of(pairs(1002)))))
    kinds = [completion[0] for completion in unpaired]
    assert kinds == ["c", "r"] * 1000 + ["c", "c", "r", "r"]
    assert unpaired[:4] == ["c0", "r2", "c1", "r3"]
    assert unpaired[1996:] == ["c998", "r0", "c999", "r1", "c1000", "c1001", "r1000", "r1001"]


def test_a_dataset_that_is_unpaired_already_stays_as_it_is() -> None:
    unpaired = Dataset.from_list([{"prompt": f"p{row}", "completion": f"c{row}", "label": True} for row in range(4)])
    assert data_utils.maybe_unpair_preference_dataset(unpaired) is unpaired


def test_the_cache_knows_the_rows_of_the_patch_from_those_of_trl(switch: Any) -> None:
    dataset = Dataset.from_list(rows_of(pairs(3)))
    patched, again = (data_utils.unpair_preference_dataset(dataset)._fingerprint for _ in range(2))
    with switch.off():
        of_trl = data_utils.unpair_preference_dataset(dataset)._fingerprint
    assert patched == again != of_trl


def test_batches_of_any_even_size_have_as_many_of_both_kinds() -> None:
    labels = data_utils._unpair_row(pairs(12))["label"]
    for size in (2, 4, 6, 8):
        batches = [labels[begin : begin + size] for begin in range(0, len(labels), size)]
        assert {sum(batch) * 2 - len(batch) for batch in batches} == {0}
    assert not any(itertools.starmap(lambda before, kind: before == kind, itertools.pairwise(labels)))
