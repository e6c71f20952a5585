"""The orders cover every pair of patches, are always the same, and are about as many as the patches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.proving import orderings

FIFTEEN = [f"made-up-{number}" for number in range(15)]
ids_of_patches = st.lists(st.text(min_size=1), min_size=1, max_size=15, unique=True)


def successions(orders: Sequence[orderings.Order]) -> set[tuple[str, str]]:
    """Return the pairs of which one comes directly before the other in some order."""
    return {pair for order in orders for pair in itertools.pairwise(order)}


@given(ids_of_patches)
def test_every_patch_is_applied_directly_before_every_other(ids: list[str]) -> None:
    orders = orderings.applying(ids)
    assert all(sorted(order) == sorted(ids) for order in orders)
    assert successions(orders) == set(itertools.permutations(ids, 2))


@given(ids_of_patches)
def test_there_are_about_as_many_orders_as_patches(ids: list[str]) -> None:
    orders = orderings.applying(ids)
    assert len(set(orders)) == len(orders)
    if len(ids) <= 3:
        assert len(orders) == math.factorial(len(ids))
    else:
        assert len(ids) <= len(orders) <= len(ids) + 1 + orderings.SAMPLED


@given(ids_of_patches)
def test_patches_come_off_inside_out_outside_in_and_mixed(ids: list[str]) -> None:
    applied = tuple(ids)
    orders = orderings.removing(applied)
    assert all(sorted(order) == sorted(ids) for order in orders)
    assert orders[:2] == [applied, applied[::-1]][: len(orders)]
    assert len(orders) == min(len(ids), 3)


@given(ids_of_patches)
def test_every_order_has_a_round_and_every_way_to_come_off(ids: list[str]) -> None:
    rounds = orderings.rounds(ids)
    assert [*dict.fromkeys(applied for applied, _ in rounds)] == orderings.applying(ids)
    assert all(removed in orderings.removing(applied) for applied, removed in rounds)
    ways = {orderings.removing(applied).index(removed) for applied, removed in rounds}
    assert ways == set(range(min(len(ids), 3)))


@pytest.mark.parametrize(("count", "rounds"), [(1, 1), (2, 4), (3, 18), (4, 9), (5, 13), (15, 24)])
def test_the_rounds_grow_as_the_patches_do(count: int, rounds: int) -> None:
    assert len(orderings.rounds(FIFTEEN[:count])) == rounds


@pytest.mark.parametrize("count", [3, 8, 15])
def test_the_rounds_are_always_the_same(count: int) -> None:
    assert orderings.rounds(FIFTEEN[:count]) == orderings.rounds(FIFTEEN[:count])


def test_the_sample_is_the_one_on_record() -> None:
    """Another Python, or another process, applies the same sample."""
    assert orderings.applying(list("abcde"))[-3:] == [tuple("cdaeb"), tuple("aedbc"), tuple("adbce")]
