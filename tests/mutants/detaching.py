"""What a mutant calls that has lost a gradient."""

from __future__ import annotations

from typing import Any


def detached(value: Any) -> Any:
    """Return ``value`` with its tensors detached. Whatever else it is stays as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(detached(item) for item in value)
    return value
