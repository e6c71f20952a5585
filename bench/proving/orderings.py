"""The orders in which patches of one method go on and come off: of up to three all orders, of more a few that cover."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

SEED = 20260919
SAMPLED = 8

Order = tuple[str, ...]


def rounds(ids: Sequence[str]) -> list[tuple[Order, Order]]:
    """Return in which orders to apply and to remove patches: of more than three, about as many rounds as patches."""
    orders = applying(ids)
    if len(ids) <= 3:
        return [(applied, removed) for applied in orders for removed in removing(applied)]
    return [(applied, removing(applied)[index % 3]) for index, applied in enumerate(orders)]


def applying(ids: Sequence[str]) -> list[Order]:
    """Return the orders in which to apply patches, and in one of them each directly before each other one.

    Of more than three these are about as many as the patches, and a seeded sample is added.
    """
    if len(ids) <= 3:
        return list(itertools.permutations(ids))
    generator = random.Random(SEED)
    sample = [tuple(generator.sample(ids, len(ids))) for _ in range(SAMPLED)]
    return _distinct([*neighbourly(ids), *sample])


def removing(applied: Order) -> list[Order]:
    """Return the orders in which to remove patches: from the innermost out, from the outermost in, and a mixed one."""
    mixed = (*applied[1:], *applied[:1])
    if len(applied) > 3:
        mixed = tuple(random.Random(SEED).sample(applied, len(applied)))
    return _distinct([applied, applied[::-1], mixed])


def neighbourly(ids: Sequence[str]) -> Iterator[Order]:
    """Yield orders in which each id comes directly before each other one, somewhere.

    The complete graph of an even number of points falls apart into zigzags through all points, 0, 1, -1, 2, -2, ...,
    each shifted by one against the last (Walecki). An odd number gets one point more, which is then left out.
    """
    count = len(ids) + len(ids) % 2
    zigzag = [(step + 1) // 2 * (1 if step % 2 else -1) for step in range(count)]
    for shift in range(count // 2):
        points = [(shift + turn) % count for turn in zigzag]
        path = tuple(ids[point] for point in points if point < len(ids))
        yield path
        yield path[::-1]


def _distinct(orders: Sequence[Order]) -> list[Order]:
    return list(dict.fromkeys(orders))
