"""GRPO and RLOO trainers fail for a quantised model, because their arguments cannot be copied (TRL issue 3980).

PEFT switches checkpointing on, so ``prepare_peft_model`` of TRL 0.22 switches it off in a copy of the arguments:
``dataclasses.replace(args, gradient_checkpointing=False)``. ``GRPOConfig`` and ``RLOOConfig`` refuse to be given both
``generation_batch_size`` and ``steps_per_generation``, one of which they set themselves the first time.

TRL 0.23.0 (pull request 3981) changes the arguments instead of copying them. The wrapper lets a plain record be copied,
so that the trainer's own arguments stay as they are, as those of the other trainers of 0.22 do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, replaced_argument
from ..model import Outcome


@dataclass
class _ReadArguments:
    """The arguments that ``prepare_peft_model`` reads."""

    bf16: bool
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Any


def let_the_arguments_be_copied(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``prepare_peft_model`` with arguments that have no ``__post_init__``, if it would copy them."""
    model, settings = (argument(wrapped, args, kwargs, name) for name in ("model", "args"))
    quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if quantised and hasattr(settings, "steps_per_generation"):
        read = _ReadArguments(settings.bf16, settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs)
        args, kwargs = replaced_argument(wrapped, args, kwargs, "args", read)
    return wrapped(*args, **kwargs)


def adapter_of_a_quantised_model_is_made(module: ModuleType) -> Outcome:
    """Make an adapter on a model that claims to be loaded in 4 bits, with arguments that can be computed only once."""
    import torch
    from peft import LoraConfig

    class Base(torch.nn.Module):  # type: ignore[misc]
        is_loaded_in_4bit = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        # Methods that models of transformers have for checkpointing.
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
