"""An end-of-sequence id that equals each of several, for TRL's code that compares tokens with one.

The names begin with an underscore because the evidence of patches has them in its keys.
"""

from __future__ import annotations

from typing import Any


class _AnyOf(int):
    """An id that equals each of several, in ``id == eos`` and ``tensor == eos``. Otherwise it is the first of them."""

    ids: list[int]

    def __new__(cls, first: int, ids: list[int]) -> _AnyOf:
        eos = super().__new__(cls, first)
        eos.ids = ids
        return eos

    def __eq__(self, other: object) -> bool:
        return other in self.ids

    def __ne__(self, other: object) -> bool:
        return other not in self.ids

    __hash__ = int.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        if function in (torch.Tensor.__eq__, torch.Tensor.eq, torch.eq):
            (tensor,) = (operand for operand in args if isinstance(operand, torch.Tensor))
            (eos,) = (operand for operand in args if isinstance(operand, cls))
            return torch.stack([tensor == one for one in eos.ids]).any(0)
        return function(*(int(value) if isinstance(value, cls) else value for value in args), **(kwargs or {}))


def _with_eos_id(tokenizer: Any, eos: _AnyOf) -> Any:
    """Return a view of ``tokenizer`` whose ``eos_token_id`` is ``eos``."""
    import wrapt

    class EosView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        pass

    EosView.eos_token_id = property(lambda self: eos)  # type: ignore[attr-defined]
    return EosView(tokenizer)
