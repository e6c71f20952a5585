"""What a mutant calls that has lost a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

has_gradient: set[str] = set()
"""The names of the returned values that were seen with a gradient."""


def noted(name: str, value: Any) -> Any:
    """Return ``value``, and note ``name`` if it has a tensor with a gradient: it can lose it."""

    def note(tensor: Any) -> Any:
        if tensor.requires_grad:
            has_gradient.add(name)
        return tensor

    _each_tensor(value, note)
    return value


def detached(value: Any) -> Any:
    """Return ``value`` with its tensors detached. Whatever else it is stays as it is."""
    return _each_tensor(value, lambda tensor: tensor.detach())


def _each_tensor(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` of each tensor in it, within tuples and dictionaries too."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_each_tensor(item, change) for item in value)
    if type(value) is dict:
        return {name: _each_tensor(item, change) for name, item in value.items()}
    return value
