"""Each batch of rows packs its own tokens, in each column, wherever the batch begins in the table."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from trl import data_utils, pack_dataset

import tiny

ID = "sft-wrapped-packing-duplicates"
LENGTH = 4

Rows = list[list[int]]
ROWS: Rows = [[10 * row + place for place in range(1 + row % 3)] for row in range(11)]
BATCHES = ((0, 4), (4, 8), (8, 10), (10, 11))
"""Batches of unequal sizes. TRL is right about the first."""


def columns_of(rows: Rows) -> dict[str, Rows]:
    """Return the tokens, and a label for each, which is the token with a minus."""
    return {"input_ids": rows, "labels": [[-token for token in row] for row in rows]}


def table_of(rows: Rows, kind: Any = pa.list_) -> Any:
    return pa.table({name: pa.array(values, kind(pa.int64())) for name, values in columns_of(rows).items()})


def wrapped(rows: Rows, seq_length: int = LENGTH) -> dict[str, Rows]:
    """Return the columns that the packed rows must have."""
    tokens = [*itertools.chain(*rows)]
    return columns_of([tokens[begin : begin + seq_length] for begin in range(0, len(tokens), seq_length)])


def packed(table: Any, seq_length: int = LENGTH) -> Any:
    return data_utils._pack_wrapped(table, seq_length).to_pydict()


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list], ids=["lists", "large lists"])
def test_each_batch_packs_its_own_rows(kind: Any) -> None:
    table = table_of(ROWS, kind)
    for begin, end in BATCHES * 2:
        result = data_utils._pack_wrapped(examples=table.slice(begin, end - begin), seq_length=LENGTH)
        assert result.to_pydict() == wrapped(ROWS[begin:end])
        assert result.schema.equals(table.schema)
    assert table.equals(table_of(ROWS, kind))


def test_trl_packs_the_first_tokens_of_the_table_again(switch: Any) -> None:
    tokens = [*itertools.chain(*ROWS)]
    with switch.off():
        for begin, end in BATCHES:
            length = sum(map(len, ROWS[begin:end]))
            assert packed(table_of(ROWS).slice(begin, end - begin)) == wrapped([tokens[:length]])


@pytest.mark.parametrize("seq_length", [1, 3, 7, 100])
def test_the_length_is_that_of_the_caller(seq_length: int) -> None:
    assert packed(table_of(ROWS).slice(2), seq_length) == wrapped(ROWS[2:], seq_length)


def test_a_batch_may_begin_with_the_second_row() -> None:
    assert packed(table_of(ROWS).slice(1)) == wrapped(ROWS[1:])


@pytest.mark.parametrize("sliced", ["input_ids", "labels"])
def test_a_batch_is_copied_if_any_column_is_a_slice(sliced: str) -> None:
    slices, whole = table_of(ROWS).slice(5), table_of(ROWS[5:])
    table = pa.table({name: (slices if name == sliced else whole)[name] for name in ("input_ids", "labels")})
    with tiny.counted(ID) as counts:
        assert packed(table) == wrapped(ROWS[5:])
        assert counts().acted == 1


def test_a_batch_is_copied_if_one_column_is_a_slice_and_the_other_has_chunks() -> None:
    slices, parts = table_of(ROWS).slice(5), [table_of(ROWS[5:8])["input_ids"], table_of(ROWS[8:])["input_ids"]]
    chunks = pa.chunked_array([part.chunk(0) for part in parts])
    assert packed(pa.table({"input_ids": chunks, "labels": slices["labels"]})) == wrapped(ROWS[5:])


def first_batch() -> tuple[Any, Rows]:
    return table_of(ROWS).slice(0, 4), ROWS[:4]


def whole_table() -> tuple[Any, Rows]:
    return table_of(ROWS), ROWS


def chunks_of_slices() -> tuple[Any, Rows]:
    """TRL copies several chunks itself."""
    table = table_of(ROWS)
    return pa.concat_tables([table.slice(4, 3), table.slice(7)]), ROWS[4:]


@pytest.mark.parametrize("make", [first_batch, whole_table, chunks_of_slices])
def test_trl_packs_what_is_no_slice(make: Any, switch: Any) -> None:
    table, rows = make()
    with tiny.counted(ID) as counts:
        assert packed(table) == wrapped(rows)
        assert not counts().acted
    with switch.off():
        assert packed(table) == wrapped(rows)


def test_a_batch_that_is_a_slice_counts() -> None:
    with tiny.counted(ID) as counts:
        for begin, end in BATCHES:
            packed(table_of(ROWS).slice(begin, end - begin))
        assert counts().acted == 3


def test_each_batch_of_each_dataset_is_packed_so() -> None:
    parts = {"train": Dataset.from_dict(columns_of(ROWS)), "test": Dataset.from_dict(columns_of(ROWS[::-1]))}
    result = pack_dataset(DatasetDict(parts), LENGTH, strategy="wrapped", map_kwargs={"batch_size": 4})
    for name, rows in {"train": ROWS, "test": ROWS[::-1]}.items():
        batches = [wrapped(rows[begin : begin + 4])["input_ids"] for begin in (0, 4, 8)]
        assert result[name].to_dict() == columns_of([*itertools.chain(*batches)])
