"""Rows are taken out of a dataset, and out of a stream when it is read."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from datasets import Dataset

from trl_hotfix.authoring import only_rows
from trl_hotfix.testing import single_process, stream

SETTINGS = SimpleNamespace(dataset_num_proc=None)


def left(dataset: Any) -> Any:
    module = ModuleType("made_up")
    module.PartialState = object  # type: ignore[attr-defined]
    with single_process(module):
        return only_rows(module, dataset, lambda row: row["number"] > 1, SETTINGS, "Dropping rows")


def test_rows_are_taken_out() -> None:
    rows = [{"number": number} for number in (1, 2, 3)]
    assert list(left(Dataset.from_list(rows))) == rows[1:]
    assert list(left(stream(rows))) == rows[1:]


def test_a_dataset_that_keeps_all_rows_is_the_same() -> None:
    dataset = Dataset.from_list([{"number": 2}])
    assert left(dataset) is dataset
