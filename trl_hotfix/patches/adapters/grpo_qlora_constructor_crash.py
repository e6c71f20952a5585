"""GRPO and RLOO trainers fail for a quantised model, because their arguments cannot be copied (TRL issue 3980).

PEFT switches checkpointing on, so ``prepare_peft_model`` of TRL 0.22 switches it off in a copy of the arguments:
``dataclasses.replace(args, gradient_checkpointing=False)``. ``GRPOConfig`` and ``RLOOConfig`` refuse to get both
``generation_batch_size`` and ``steps_per_generation``, but set one of them themselves the first time.

TRL 0.23.0 (pull request 3981) changes the arguments instead of copying them. The wrapper lets a plain record be copied,
so that the trainer's own arguments stay as they are, as those of the other trainers of 0.22 do.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome


@dataclass
class _ReadArguments:
    """The arguments that ``prepare_peft_model`` reads."""

    bf16: bool
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: Any


@wrapper
def let_the_arguments_be_copied(call: Call) -> Any:
    """Call ``prepare_peft_model`` with arguments that have no ``__post_init__``, if it would copy them."""
    model, settings = call["model"], call["args"]
    quantised = getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)
    if not quantised or not hasattr(settings, "steps_per_generation"):
        return call()
    read = _ReadArguments(settings.bf16, settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs)
    return call.with_(args=read)()


class _CopyError(ValueError):
    """Raised where arguments are computed a second time."""


def adapter_of_a_quantised_model_is_made(module: ModuleType) -> Outcome:
    """Count the trained matrices of an adapter for a model marked as loaded in 4 bits. None is made with the bug."""
    import torch
    from peft import LoraConfig

    @dataclass
    class Arguments:
        """They have the rule of ``GRPOConfig`` and ``RLOOConfig``."""

        bf16: bool = False
        gradient_checkpointing: bool = False
        gradient_checkpointing_kwargs: Any = None
        steps_per_generation: int | None = None

        def __post_init__(self) -> None:
            if self.steps_per_generation is not None:
                raise _CopyError
            self.steps_per_generation = 1

    model: Any = torch.nn.Module()
    model.inner, model.is_loaded_in_4bit = torch.nn.Linear(2, 2), True
    trained = 0
    with suppress(_CopyError):
        prepared = module.prepare_peft_model(model, LoraConfig(r=1, target_modules=["inner"]), Arguments())
        trained = sum(weight.requires_grad for weight in prepared.parameters())
    return judge(trained, right=2, wrong=0)
