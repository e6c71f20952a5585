from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.checking.shapes import as_arguments, shape_of

PLAIN: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
GROUPS = {**PLAIN, "num_generations": 8, "steps_per_generation": None}
EARLY = {**PLAIN, "num_generations": 8}


@pytest.mark.parametrize(
    ("given", "fields", "batches", "others"),
    [
        ({}, PLAIN, (8, 1), [(2, 4), (4, 2)]),
        ({"per_device_train_batch_size": 64, "gradient_accumulation_steps": 16}, PLAIN, (4, 2), [(2, 4), (8, 1)]),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}, PLAIN, (1, 8), [(8, 1), (4, 2)]),
        ({"num_generations": 16}, GROUPS, (8, 1), [(2, 4), (4, 2)]),
        ({"num_generations": 3}, GROUPS, (6, 1), [(3, 2)]),
        ({"num_generations": 8, "gradient_accumulation_steps": 4}, EARLY, (4, 2), [(8, 1)]),
    ],
)
def test_shape(given: dict[str, Any], fields: dict[str, Any], batches: tuple[int, int], others: list[Any]) -> None:
    shape = shape_of(given, fields)
    assert (shape.batch_size, shape.accumulation) == batches
    assert shape.others() == others


def test_a_cut_shape_is_its_own() -> None:
    for fields in (PLAIN, GROUPS, EARLY):
        for batch_size in (1, 2, 8, 64):
            for times in (1, 2, 16):
                given = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": times}
                shape = shape_of(given, fields)
                again = shape_of({**given, **as_arguments(shape, 0, 0, fields)}, fields)
                assert again == shape
