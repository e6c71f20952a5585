"""How far two computations of the same loss may be apart, from the unit roundoff and the lengths of their sums.

The bound of a sum or a product of ``n`` roundings is ``n * u`` if they all go the same way. If they are independent
with mean 0, it is ``LAMBDA * sqrt(n) * u``, but for a probability of ``2 * exp(-LAMBDA**2 / 2)`` (Higham and Mary, A
new approach to probabilistic rounding error analysis, 2019). Values are stored in the dtype of the model, and added up
in float32, as tensor cores and FlashAttention do.
"""

from __future__ import annotations

import math

LAMBDA = 5.0
"""Fails by chance once in 130,000 values."""

ROUNDINGS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The unit roundoff: half the distance from 1 to the next larger number."""

STORED_BY_A_LAYER = 16
"""What a layer of Llama stores between two of its operations: norm, three projections, two rotations, attention, its
output, the sum, norm, gate, up, activation, product, down, the sum."""


def relative(dtype: str, *, layers: int, length: int, backward: bool) -> float:
    """Return the relative difference that two computations of a loss, or of a gradient, may have.

    ``length`` is that of the longest sum: the sequence, or the width of the model. Each of the two has stored
    ``STORED_BY_A_LAYER`` values one after another in each layer, and embeddings, last norm and logits. ``backward``
    goes the same way back, so that it has twice as many.
    """
    stored = (layers * STORED_BY_A_LAYER + 3) * (2 if backward else 1)
    of_one = LAMBDA * (math.sqrt(stored) * ROUNDINGS[dtype] + math.sqrt(stored * length) * ROUNDINGS["float32"])
    return 2 * of_one
