"""By what a trainer multiplies a loss before it goes backward, which depends on transformers."""

from __future__ import annotations

from typing import Any


def measure_factors(trainer: Any) -> set[float]:
    """Return a set to which each backward pass of a ``stepwise`` trainer adds its factor.

    It is 1 where the loss goes backward as it is, and one over the micro-batches where transformers divides by them.
    With TRL 0.28.0 transformers 5.2 divides once more.
    """
    factors: set[float] = set()
    backward = trainer.accelerator.backward

    def add_factor(loss: Any, *args: Any, **kwargs: Any) -> Any:
        computed = trainer.steps[-1].micro_batches[-1].loss
        factors.add(round(float(loss.detach()) / computed / trainer.accelerator.gradient_accumulation_steps, 4))
        return backward(loss, *args, **kwargs)

    trainer.accelerator.backward = add_factor
    return factors
