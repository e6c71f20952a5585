from __future__ import annotations

from trl_hotfix.checking.ordering import reversed_in_steps
from trl_hotfix.checking.rows import chosen


def test_unequal_lengths_are_kept_in_order() -> None:
    lengths = [10, 20, 30, 40, 50, 60, 70, 80, 900, 1000]
    assert chosen(lengths, 4) == [0, 1, 2, 3]
    assert chosen([5, 50] * 50, 8) == sorted(chosen([5, 50] * 50, 8))
    # Of 700 rows those among the first 512 that are not the longest half.
    assert {number % 8 for number in chosen([number % 8 for number in range(512)], 32)} == {0, 1, 2, 3}


def test_few_rows_fill_whole_steps() -> None:
    assert chosen([1] * 21, 32) == list(range(16))
    assert chosen([1, 2, 3], 32) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_reversed_within_steps_and_whole_groups() -> None:
    assert reversed_in_steps([0, 1, 2, 3, 4, 5, 6], 4, 1) == [3, 2, 1, 0, 6, 5, 4]
    assert reversed_in_steps([0, 0, 1, 1, 2, 2, 3, 3], 4, 2) == [1, 1, 0, 0, 3, 3, 2, 2]
