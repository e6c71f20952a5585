"""What a mutant calls that has lost a gradient."""

from __future__ import annotations

from typing import Any

has_gradient: set[str] = set()
"""The names of the returned values that were seen with a gradient."""


def noted(name: str, value: Any) -> Any:
    """Return ``value``, and note ``name`` if it has a tensor with a gradient: it can lose it."""
    import torch

    values = value.values() if type(value) is dict else value if isinstance(value, tuple) else (value,)
    if any(isinstance(item, torch.Tensor) and item.requires_grad for item in values):
        has_gradient.add(name)
    return value


def detached(value: Any) -> Any:
    """Return ``value`` with its tensors detached. Whatever else it is stays as it is."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(detached(item) for item in value)
    if type(value) is dict:
        return {name: detached(item) for name, item in value.items()}
    return value
