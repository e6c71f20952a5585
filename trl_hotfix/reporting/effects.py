"""What a repair changed in the first step of a run, as the record has it and in words."""

from __future__ import annotations

import math
from typing import Any

from ..selection.freeze_files import FrozenEffect

_NUMBERS = ("loss", "loss_without", "gradient_norm", "gradient_norm_without", "cosine")


class Effect(FrozenEffect, frozen=True):
    """The first step of a run with a repair, and without it.

    ``loss`` is the sum of what ``training_step`` returns for its micro-batches, its mean over the ranks, which is what
    the trainer logs. ``gradient_norm`` is the norm of the gradients of all weights that train, before clipping.
    ``cosine`` is the cosine between the two gradients, None if one of them is zero. A number that is not finite is None
    in the record. ``why`` says why there are no numbers.
    """

    def line(self) -> str:
        """Return the effect in words."""
        if self.why:
            return f"not measured in step {self.step}: {self.why}"
        ratio = ""
        if self.gradient_norm and self.gradient_norm_without is not None:
            ratio = f" ({self.gradient_norm_without / self.gradient_norm:.4g} times)"
        cosine = f", cosine {self.cosine:.6f}" if self.cosine is not None else ""
        return (
            f"without it, step {self.step} has loss {_text(self.loss_without)} instead of {_text(self.loss)}, and "
            f"gradient norm {_text(self.gradient_norm_without)} instead of {_text(self.gradient_norm)}{ratio}{cosine}"
        )

    def to_dict(self) -> dict[str, Any]:
        if self.why:
            return {"step": self.step, "why": self.why}
        return {"step": self.step, **{name: _finite(getattr(self, name)) for name in _NUMBERS}}


def _finite(number: float | None) -> float | None:
    # JSON has no number for what is not finite.
    return number if number is not None and math.isfinite(number) else None


def _text(number: float | None) -> str:
    return "nan" if number is None else f"{number:.6g}"
