"""GRPO and RLOO trainers fail for a quantised model, because their arguments cannot be copied (TRL issue 3980).

PEFT switches checkpointing on, so ``prepare_peft_model`` of TRL 0.22 switches it off in a copy of the arguments:
``dataclasses.replace(args, gradient_checkpointing=False)``. ``GRPOConfig`` and ``RLOOConfig`` refuse to be given both
``generation_batch_size`` and ``steps_per_generation``, one of which they set themselves the first time.

TRL 0.23.0 (pull request 3981) changes the arguments instead of copying them. The wrapper lets a plain record be copied,
so that the trainer's own arguments stay as they are, as those of the other trainers of 0.22 do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import argument, judge, replaced_argument
from ...model import Outcome, Verdict


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
    """Make adapters on models that claim to be loaded in 4 or 8 bits, with arguments that can be computed only once.

    The arguments of other trainers can be copied, and TRL copies them itself.
    """
    outcomes = []
    for bits in (4, 8):
        for checkpointing in (True, False):
            base, arguments = _base(f"is_loaded_in_{bits}bit"), _Arguments(gradient_checkpointing=checkpointing)
            outcomes.append(_made(module, base, arguments))
            if outcomes[-1].verdict is Verdict.FIXED:
                _check(base, arguments, checkpointing=checkpointing, in_half=bits == 4)
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some adapters are made, and others are not: {outcomes}")
    # TRL reads no others of these. A record is made of all three.
    read = SimpleNamespace(bf16=True, gradient_checkpointing=False, steps_per_generation=1)
    if _made(module, _base(), read).verdict is not Verdict.FIXED:
        raise AssertionError("no adapter is made for a model that is not quantised")
    base, others = _base("is_loaded_in_4bit"), _OtherArguments()
    if _made(module, base, others).verdict is not Verdict.FIXED:
        raise AssertionError(f"no adapter is made with {others}")
    _check(base, others, checkpointing=True, in_half=True)
    # TRL 0.23.0 changes the arguments, and does not copy them.
    copies = len(others.count) - 1
    if copies != int("dataclasses" in inspect.unwrap(module.prepare_peft_model).__code__.co_names):
        raise AssertionError(f"the arguments of another trainer are copied {copies} times")
    return outcomes[0]


@dataclass
class _OtherArguments:
    """The arguments of a trainer, with how often they were computed, copies included."""

    bf16: bool = True
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: Any = field(default_factory=lambda: {"use_reentrant": False})
    count: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.count.append(None)


@dataclass
class _Arguments(_OtherArguments):
    """The rule of ``GRPOConfig`` and ``RLOOConfig``."""

    generation_batch_size: int | None = None
    steps_per_generation: int | None = None

    def __post_init__(self) -> None:
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("generation_batch_size and steps_per_generation")
        self.generation_batch_size, self.steps_per_generation = 8, 1


def _base(mark: str = "") -> Any:
    """Return a model with this mark. ``checkpointing`` has what its checkpointing was switched on with."""
    import torch

    model: Any = torch.nn.Module()
    model.inner, model.lm_head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.checkpointing = []
    model.gradient_checkpointing_enable = lambda gradient_checkpointing_kwargs=None: model.checkpointing.append(
        gradient_checkpointing_kwargs
    )
    model.enable_input_require_grads = lambda: None
    if mark:
        setattr(model, mark, True)
    return model


def _made(module: ModuleType, base: Any, arguments: Any) -> Outcome:
    """Judge by the number of trainable weights: two of a new adapter."""
    from peft import LoraConfig

    try:
        model = module.prepare_peft_model(base, LoraConfig(r=1, target_modules=["inner"]), arguments)
    except ValueError as error:
        if str(error) != "generation_batch_size and steps_per_generation":
            raise
        return judge(0, right=2, wrong=0, error=f"ValueError: {error}")
    return judge(sum(weight.requires_grad for weight in model.parameters()), right=2, wrong=0)


def _check(base: Any, arguments: Any, *, checkpointing: bool, in_half: bool) -> None:
    """Assert that a quantised model was prepared with what the arguments say."""
    import torch

    if base.checkpointing != ([arguments.gradient_checkpointing_kwargs] if checkpointing else []):
        raise AssertionError(f"checkpointing is on with {base.checkpointing}: expected that of {arguments}")
    if (base.lm_head.weight.dtype == torch.bfloat16) is not in_half:
        raise AssertionError(f"the head is in {base.lm_head.weight.dtype} with {arguments}")
