"""Packed are the first four tokens of each row, in each column, and nothing of what comes after them."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from trl import data_utils, pack_dataset

import tiny

ID = "sft-bfd-packing-splits-conversations"
LENGTH = 4
LENGTHS = (3, 9, 1, 4, 5, 2, 13, 4)
"""How many tokens the rows have. Three rows are too long, by one token, by more than ``LENGTH``, and by twice that."""

Rows = list[list[int]]
ROWS: Rows = [[20 * row + place for place in range(length)] for row, length in enumerate(LENGTHS)]
SHORT: Rows = [row[:LENGTH] for row in ROWS]


def columns_of(rows: Rows) -> dict[str, Rows]:
    """Return the tokens, and a label for each, which is the token with a minus."""
    return {"input_ids": rows, "labels": [[-token for token in row] for row in rows]}


def table_of(rows: Rows, kind: Any = pa.list_) -> Any:
    return pa.table({name: pa.array(values, kind(pa.int64())) for name, values in columns_of(rows).items()})


def sequences(packed: Any) -> list[list[int]]:
    """Return the rows that are packed, sorted. Each token has its label, and no packed row is too long."""
    columns = packed if isinstance(packed, dict) else packed.to_pydict()
    assert columns["labels"] == columns_of(columns["input_ids"])["labels"]
    assert all(len(row) <= LENGTH for row in columns["input_ids"])
    tokens = iter([token for row in columns["input_ids"] for token in row])
    found = [[*itertools.islice(tokens, length)] for lengths in columns["seq_lengths"] for length in lengths]
    assert not [*tokens]
    return sorted(found)


def pieces(rows: Rows) -> Rows:
    return [row[begin : begin + LENGTH] for row in rows for begin in range(0, len(row), LENGTH)]


def test_the_beginnings_of_all_rows_are_packed_in_each_call() -> None:
    for rows in (ROWS, ROWS[::-1], ROWS):
        assert sequences(data_utils._pack_bfd(table_of(rows), LENGTH)) == sorted(SHORT)


def test_trl_packs_every_piece(switch: Any) -> None:
    with switch.off():
        assert sequences(data_utils._pack_bfd(table_of(ROWS), LENGTH)) == sorted(pieces(ROWS))


def test_packed_is_what_trl_packs_of_rows_that_are_cut_before(switch: Any) -> None:
    patched = data_utils._pack_bfd(table_of(ROWS), LENGTH)
    with switch.off():
        assert patched.equals(data_utils._pack_bfd(table_of(SHORT), LENGTH))


@pytest.mark.parametrize("seq_length", [1, 2, 5, 13])
def test_the_length_is_that_of_the_caller(seq_length: int) -> None:
    packed = data_utils._pack_bfd(examples=table_of(ROWS), seq_length=seq_length)
    assert sorted(itertools.chain(*packed["input_ids"].to_pylist())) == sorted(
        itertools.chain(*(row[:seq_length] for row in ROWS))
    )


def test_large_lists_stay_large_lists() -> None:
    packed = data_utils._pack_bfd(table_of(ROWS, pa.large_list), LENGTH)
    assert sequences(packed) == sorted(SHORT)
    assert all(pa.types.is_large_list(packed.schema.field(name).type) for name in ("input_ids", "labels"))


def test_columns_may_be_lists_of_both_kinds() -> None:
    small, large = table_of(ROWS), table_of(ROWS, pa.large_list)
    mixed = pa.table({"input_ids": small["input_ids"], "labels": large["labels"]})
    assert sequences(data_utils._pack_bfd(mixed, LENGTH)) == sorted(SHORT)


def test_only_the_rows_of_a_slice_are_packed() -> None:
    # A later batch of a dataset is one.
    assert sequences(data_utils._pack_bfd(table_of(ROWS).slice(3), LENGTH)) == sorted(SHORT[3:])


def test_the_rows_of_all_chunks_are_packed() -> None:
    table = table_of(ROWS)
    chunks = pa.concat_tables([table.slice(0, 2), table.slice(4)])
    assert sequences(data_utils._pack_bfd(chunks, LENGTH)) == sorted(SHORT[:2] + SHORT[4:])


@pytest.mark.parametrize("row", range(3))
def test_rows_are_cut_if_any_of_them_is_too_long(row: int) -> None:
    rows = [[1, 2, 3, 4], [5], [6]]
    rows[row] = [11, 12, 13, 14, 15]
    assert sequences(data_utils._pack_bfd(table_of(rows), LENGTH)) == sorted(each[:LENGTH] for each in rows)


def test_rows_are_cut_if_another_column_than_the_first_is_longer() -> None:
    table = pa.table({"input_ids": [[1] * LENGTH], "labels": [[-1] * (LENGTH + 1)]})
    with tiny.counted(ID) as counts:
        assert sequences(data_utils._pack_bfd(examples=table, seq_length=LENGTH)) == [[1] * LENGTH]
        assert counts().acted == 1


@pytest.mark.parametrize("rows", [[[1] * LENGTH, [2]], [[1]], [[1] * LENGTH] * 3], ids=["unequal", "one", "full"])
def test_rows_that_fit_are_packed_by_trl(rows: Rows, switch: Any) -> None:
    with tiny.counted(ID) as counts:
        patched = data_utils._pack_bfd(table_of(rows), LENGTH)
        assert not counts().acted
    with switch.off():
        assert patched.equals(data_utils._pack_bfd(table_of(rows), LENGTH))


def test_trl_refuses_columns_without_lists() -> None:
    table = pa.table({"input_ids": [[1] * 5], "text": ["a"]})
    with tiny.counted(ID) as counts, pytest.raises(TypeError, match="list-like"):
        data_utils._pack_bfd(table, LENGTH)
    assert not counts().acted


@pytest.mark.parametrize("options", [{}, {"strategy": "bfd"}], ids=["by default", "by name"])
def test_each_batch_of_a_dataset_is_packed_so(options: dict[str, str]) -> None:
    datasets = DatasetDict({"train": Dataset.from_dict(columns_of(ROWS)), "test": Dataset.from_dict(columns_of(ROWS))})
    packed = pack_dataset(datasets, LENGTH, map_kwargs={"batch_size": 5}, **options)
    for part in packed.values():
        assert sequences(part.to_dict()) == sorted(SHORT)


def test_a_dataset_that_is_wrapped_keeps_all_tokens() -> None:
    dataset = Dataset.from_dict({"input_ids": ROWS})
    packed = pack_dataset(dataset, LENGTH, strategy="wrapped")
    assert [*itertools.chain(*packed["input_ids"])] == [*itertools.chain(*ROWS)]


def test_trl_fails_on_a_table_without_rows_as_before(switch: Any) -> None:
    with pytest.raises(pa.ArrowInvalid) as patched:
        data_utils._pack_bfd(table_of([]), LENGTH)
    with switch.off(), pytest.raises(pa.ArrowInvalid) as unpatched:
        data_utils._pack_bfd(table_of([]), LENGTH)
    assert str(patched.value) == str(unpatched.value)
