"""What is trained of a quantised ``PeftModel`` is trained after it is prepared too, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import SFTTrainer
from trl.models import utils

import tiny

HAS_FUNCTION = hasattr(utils, "prepare_peft_model")
TARGET = f"{utils.__name__}:prepare_peft_model"
if not HAS_FUNCTION:
    TARGET = "trl.trainer.sft_trainer:SFTTrainer._prepare_peft_model"

ID = "qlora-peftmodel-frozen"
LORA = LoraConfig(r=1, target_modules=["inner"], modules_to_save=["head"])
TRAINED = {f"base_model.model.{name}.weight" for name in ("inner.lora_A.default", "inner.lora_B.default")} | {
    f"base_model.model.head.modules_to_save.default.{name}" for name in ("weight", "bias")
}


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.checkpointing = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.checkpointing = True

    def enable_input_require_grads(self) -> None: ...


@dataclasses.dataclass
class Arguments:
    bf16: bool = False
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: Any = None


def quantised(model: Any, bits: int = 4) -> Any:
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return model


def peft_model(bits: int = 4, active: str = "default") -> Any:
    """Return a quantised model with a trained adapter and a frozen one."""
    model = get_peft_model(Base(), LORA)
    model.add_adapter("ref", LORA)
    model.set_adapter(active)
    # If the flag were set earlier, peft would look for bitsandbytes.
    quantised(model.base_model.model, bits)
    return model


def prepared(model: Any, peft_config: Any = None, **settings: Any) -> Any:
    """Call the method, which reads nothing of its trainer."""
    prepare = utils.prepare_peft_model if HAS_FUNCTION else object.__new__(SFTTrainer)._prepare_peft_model
    return prepare(model, peft_config, Arguments(**settings))


def trained(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": False}], ids=["checkpointing", "none"])
def test_the_active_adapter_and_its_modules_are_trained(bits: int, settings: dict[str, Any]) -> None:
    model = peft_model(bits)
    assert prepared(model, **settings) is model
    assert trained(model) == TRAINED


def test_trl_freezes_all_of_it(switch: Any) -> None:
    model = peft_model()
    with switch.off():
        assert not trained(prepared(model))


def test_another_adapter_is_trained_if_it_is_the_active_one() -> None:
    model = peft_model(active="ref")
    before = trained(model)
    assert before == {name.replace("default", "ref") for name in TRAINED}
    assert trained(prepared(model)) == before


def test_each_model_is_trained() -> None:
    for _ in range(2):
        assert trained(prepared(peft_model())) == TRAINED


def test_a_part_that_the_user_has_frozen_stays_frozen() -> None:
    model = peft_model()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in TRAINED and "lora_A" not in name)
    assert trained(prepared(model)) == {name for name in TRAINED if "lora_A" not in name}


def test_a_frozen_model_stays_frozen() -> None:
    model = peft_model()
    model.requires_grad_(False)
    with tiny.counted(ID, TARGET) as counts:
        assert not trained(prepared(model))
        assert counts().acted == 0


def test_a_model_without_an_adapter_is_prepared_as_trl_does() -> None:
    model = quantised(Base())
    assert not trained(prepared(model))
    assert model.checkpointing


def test_the_wrapper_acts_once_for_each_weight_or_call() -> None:
    with tiny.counted(ID, TARGET) as counts:
        prepared(peft_model())
        assert counts().acted == 1


# peft would look for bitsandbytes if these models were marked.


def test_a_new_adapter_is_trained() -> None:
    assert trained(prepared(Base(), LORA)) == TRAINED


@pytest.mark.skipif(not HAS_FUNCTION, reason="the new adapter is put around the old one")
def test_a_new_adapter_in_the_place_of_another_one_is_trained_alone() -> None:
    model = get_peft_model(Base(), LoraConfig(r=1, target_modules=["inner"], bias="all"))
    # The method of peft shows a progress bar, whose thread stays.
    model.merge_and_unload = Base
    assert trained(prepared(model, LORA)) == TRAINED
