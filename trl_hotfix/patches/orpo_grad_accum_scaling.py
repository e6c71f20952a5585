"""ORPO leaves the division by ``gradient_accumulation_steps`` to nobody.

``Trainer.training_step`` of transformers 4.48.1 to 4.52 divides the loss by ``gradient_accumulation_steps`` only if
``model_accepts_loss_kwargs`` is False, after ``compute_loss`` has returned. ``Trainer`` sets it to True for a model
whose forward takes ``**kwargs``, as it is to divide by the number of tokens itself. ORPO calls such a model for its
logits, and takes a mean of its own. TRL 0.20.0 sets it to False in the constructor (pull request 3716), 0.14.0 in those
of the other preference trainers; the wrapper does when the loss is computed.

Before transformers 4.49 (pull request 35808) the engine of DeepSpeed divides as well, and the run is right as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import act, nobody_divides
from ..model import Outcome
from ..testing import judge_accumulation


def have_the_loss_divided(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Tell transformers, which asks after this call, that this loss is not divided by the number of micro-batches."""
    if nobody_divides(instance):
        act()
        instance.model_accepts_loss_kwargs = False
    return wrapped(*args, **kwargs)


def gradient_is_the_mean_of_the_micro_batches(module: ModuleType) -> Outcome:
    """Let transformers run micro-batches, and judge their gradients."""
    return judge_accumulation(module)
