from __future__ import annotations

from trl_hotfix import fingerprint


def test_the_order_of_a_set_among_the_constants_is_no_difference() -> None:
    # 0 and 8 fall into the same slot of a small set, so that the order is that in which they came.
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert (repr(one), one) != (repr(other), other)
    code = (lambda: None).__code__
    shapes = [fingerprint._shape(code.replace(co_consts=(None, ("a", each)))) for each in (one, other, frozenset([0]))]
    assert shapes[0] == shapes[1] != shapes[2]
