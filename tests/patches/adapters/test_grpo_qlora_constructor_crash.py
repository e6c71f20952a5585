"""A quantised model is prepared with arguments that cannot be copied, and these stay as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl.models import utils

import tiny

ID, TARGET = "grpo-qlora-constructor-crash", "trl.models.utils:prepare_peft_model"
LORA = LoraConfig(r=1, target_modules=["inner"])

each_width = pytest.mark.parametrize("bits", [4, 8])
each_checkpointing = pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "none"])


@dataclass
class OtherArguments:
    """The arguments of a trainer, with how often they were computed, copies included."""

    bf16: bool = True
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: Any = field(default_factory=lambda: {"use_reentrant": False})
    computed: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed.append(None)


@dataclass
class Arguments(OtherArguments):
    """They have the rule of ``GRPOConfig`` and ``RLOOConfig``."""

    generation_batch_size: int | None = None
    steps_per_generation: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError("generation_batch_size and steps_per_generation")
        self.generation_batch_size, self.steps_per_generation = 8, 1


def base(bits: int = 0) -> Any:
    """Return a model that is marked as loaded in this many bits, if any."""
    model: Any = torch.nn.Module()
    model.inner, model.lm_head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.checkpointing = []
    model.gradient_checkpointing_enable = lambda gradient_checkpointing_kwargs=None: model.checkpointing.append(
        gradient_checkpointing_kwargs
    )
    model.enable_input_require_grads = lambda: None
    if bits:
        setattr(model, f"is_loaded_in_{bits}bit", True)
    return model


def is_prepared(model: Any, arguments: Any, bits: int = 0) -> None:
    """Assert that the model gets an adapter, and is prepared with what the arguments say."""
    prepared = utils.prepare_peft_model(model, LORA, arguments)
    assert sum(weight.requires_grad for weight in prepared.parameters()) == 2
    checkpointing = [arguments.gradient_checkpointing_kwargs] if arguments.gradient_checkpointing else []
    assert model.checkpointing == checkpointing
    assert (model.lm_head.weight.dtype == torch.bfloat16) is (bits == 4 and arguments.bf16)


@each_width
@each_checkpointing
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "float32"])
def test_a_quantised_model_gets_an_adapter(bits: int, checkpointing: bool, bf16: bool) -> None:
    arguments = Arguments(bf16=bf16, gradient_checkpointing=checkpointing)
    is_prepared(base(bits), arguments, bits)
    assert (arguments.gradient_checkpointing, arguments.steps_per_generation) == (checkpointing, 1)
    assert len(arguments.computed) == 1


@each_width
@each_checkpointing
def test_trl_copies_the_arguments(bits: int, checkpointing: bool, switch: Any) -> None:
    arguments = Arguments(gradient_checkpointing=checkpointing)
    with switch.off(), pytest.raises(ValueError, match="generation_batch_size and steps_per_generation"):
        utils.prepare_peft_model(base(bits), LORA, arguments)


def test_each_trainer_gets_an_adapter() -> None:
    with tiny.counted(ID, TARGET) as counts:
        for _ in range(2):
            is_prepared(base(4), Arguments(), 4)
        assert counts().acted == 2


@each_checkpointing
def test_a_model_that_is_not_quantised_is_prepared_as_trl_does(checkpointing: bool, switch: Any) -> None:
    arguments, model, of_trl = Arguments(gradient_checkpointing=checkpointing), base(), base()
    with tiny.counted(ID, TARGET) as counts:
        prepared = utils.prepare_peft_model(model, LORA, arguments)
        assert counts().acted == 0
    assert sum(weight.requires_grad for weight in prepared.parameters()) == 2
    with switch.off():
        utils.prepare_peft_model(of_trl, LORA, arguments)
    assert model.checkpointing == of_trl.checkpointing
    assert len(model.checkpointing) == checkpointing


def test_of_a_model_that_is_not_quantised_trl_reads_what_there_is() -> None:
    # A record is made of all three.
    read = SimpleNamespace(bf16=True, gradient_checkpointing=False, steps_per_generation=1)
    prepared = utils.prepare_peft_model(base(), LORA, read)
    assert sum(weight.requires_grad for weight in prepared.parameters()) == 2


@each_width
def test_the_arguments_of_other_trainers_are_copied_by_trl(bits: int) -> None:
    arguments = OtherArguments()
    with tiny.counted(ID, TARGET) as counts:
        is_prepared(base(bits), arguments, bits)
        assert counts().acted == 0
    assert len(arguments.computed) == 2
