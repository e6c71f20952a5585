"""How far two numbers that must agree may be apart."""

from __future__ import annotations

from typing import Any

TERMS = 20_000
"""The terms of a sum over the tokens, the features and the layers of a step of the tiny models."""


def tolerance(dtype: Any, terms: int = TERMS) -> float:
    """Return the relative difference that the order of a sum of ``terms`` may make: its rounding errors add up.

    They are independent, so they grow as the square root (Higham, Accuracy and Stability of Numerical Algorithms,
    2002, section 4.2). The factor leaves room for functions that are steep.
    """
    import torch

    return float(8 * torch.finfo(dtype).eps * terms**0.5)
