"""How far the gradients that two launches have saved are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(result: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest difference of a gradient. Both have gradients of the same names, and at least one."""
    gradients, expected_gradients = result["gradients"], expected["gradients"]
    assert gradients.keys() == expected_gradients.keys()
    assert gradients
    return max(float((gradients[name] - expected_gradients[name]).abs().max()) for name in gradients)
