"""GRPO and RLOO cannot be made with a quantised model.

``prepare_peft_model`` of TRL 0.22 switches checkpointing off in a copy of the arguments, since peft has switched it on:
``dataclasses.replace(args, gradient_checkpointing=False)``. That makes the arguments anew, from values that have been
worked out already, and ``GRPOConfig`` and ``RLOOConfig`` refuse to be given both ``generation_batch_size`` and
``steps_per_generation``, one of which they set themselves the first time: ``ValueError``, 'generation_batch_size' and
'steps_per_generation' can not be both configured at the same time (TRL issue 3980), whatever was configured.

TRL 0.23.0 (pull request 3981) changes the arguments instead of copying them. Here the function is given a plain record
of the three arguments that it reads, which can be copied. The trainer's own stay as they are, as those of the other
trainers of 0.22 do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, replaced_argument
from ..model import Outcome


@dataclass
class _Read:
    """The arguments that ``prepare_peft_model`` reads."""

    bf16: bool
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Any


def let_the_arguments_be_copied(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``prepare_peft_model`` with arguments that have no ``__post_init__``, where a copy would be made."""
    model, settings = (argument(wrapped, args, kwargs, name) for name in ("model", "args"))
    quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if quantised and hasattr(settings, "steps_per_generation"):
        read = _Read(settings.bf16, settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs)
        args, kwargs = replaced_argument(wrapped, args, kwargs, "args", read)
    return wrapped(*args, **kwargs)


def adapter_of_a_quantised_model_is_made(module: ModuleType) -> Outcome:
    """A new adapter on a model that says it is loaded in 4 bits, with arguments that work themselves out once."""
    import torch
    from peft import LoraConfig

    class Base(torch.nn.Module):  # type: ignore[misc]
        is_loaded_in_4bit = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        # What transformers' models have for checkpointing.
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None: ...
        def enable_input_require_grads(self) -> None: ...

    @dataclass
    class Arguments:
        """The rule of ``GRPOConfig`` and ``RLOOConfig``."""

        bf16: bool = False
        gradient_checkpointing: bool = True
        gradient_checkpointing_kwargs: Any = None
        generation_batch_size: int | None = None
        steps_per_generation: int | None = None

        def __post_init__(self) -> None:
            if self.generation_batch_size is not None and self.steps_per_generation is not None:
                raise ValueError("generation_batch_size and steps_per_generation")
            self.generation_batch_size, self.steps_per_generation = 8, 1

    try:
        model = module.prepare_peft_model(Base(), LoraConfig(r=1, target_modules=["inner"]), Arguments())
    except ValueError as error:
        if str(error) != "generation_batch_size and steps_per_generation":
            raise
        return judge(0, right=2, wrong=0, error=f"ValueError: {error}")
    return judge(sum(weight.requires_grad for weight in model.parameters()), right=2, wrong=0)
