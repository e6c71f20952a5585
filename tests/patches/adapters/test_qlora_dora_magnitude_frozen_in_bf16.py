"""DoRA's magnitude vectors keep their own numbers in float32, and LoRA's matrices are cast to bfloat16 all the same."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from trl_hotfix.authoring import shadowed
from trl_hotfix.call import Call
from trl_hotfix.patches.adapters.qlora_dora_magnitude_frozen_in_bf16 import keep_magnitudes
from trl_hotfix.testing import StopConstruction, base_for_adapters, default_arguments, single_process, tiny_tokenizer

MODULES = {name: f"trl.trainer.{name.lower()}_trainer" for name in ("SFT", "GRPO", "Reward", "RLOO", "DPO", "KTO")}
EXPERIMENTAL = "trl.experimental.kto.kto_trainer"


def casts(name: str, path: str) -> bool:
    """Return whether this trainer is made here, and casts the adapters of a quantised model."""
    try:
        trainer_class = getattr(importlib.import_module(path), f"{name}Trainer")
    except (ImportError, AttributeError):
        return False
    constructor = inspect.unwrap(trainer_class.__init__)
    code = constructor.__code__
    return (
        constructor.__module__ == path
        and {"bfloat16", "get_peft_model"} <= set(code.co_names)
        and "is_loaded_in_8bit" in str(code.co_consts)
    )


each_trainer = pytest.mark.parametrize(
    ("name", "path"), [item for item in [*MODULES.items(), ("KTO", EXPERIMENTAL)] if casts(*item)]
)
each_adapter = pytest.mark.parametrize("given", [False, True], ids=["a new adapter", "one that there is"])

NUMBERS = (3.3, 0.7)
"""Of the two magnitude vectors. bfloat16 has neither."""


def dora(*, use_dora: bool = True) -> LoraConfig:
    return LoraConfig(r=1, target_modules=["q_proj", "v_proj"], use_dora=use_dora)


def with_adapter(model: Any, config: LoraConfig) -> Any:
    """Give a model an adapter, whose magnitudes are those of ``NUMBERS``."""
    model = get_peft_model(model, config)
    for weight, number in zip(magnitudes(model), NUMBERS, strict=False):
        weight.data.fill_(number)
    return model


def model_of(*, given: bool, quantised: bool = True, use_dora: bool = True) -> Any:
    base = base_for_adapters()
    base.config.num_labels = 1
    model = base
    if given:
        model = with_adapter(base, dora(use_dora=use_dora))
        model.add_adapter("beside", dora(use_dora=use_dora))
    base.is_loaded_in_8bit = quantised
    return model


def magnitudes(model: Any, adapter: str = "default") -> list[Any]:
    end = f"lora_magnitude_vector.{adapter}"
    return [weight for name, weight in model.named_parameters() if end in name]


def weights(model: Any, part: str) -> list[Any]:
    return [weight for name, weight in model.named_parameters() if part in name]


def dtypes(some: list[Any]) -> set[Any]:
    assert some
    return {weight.dtype for weight in some}


class Made:
    """A trainer as its own constructor hands it to that of transformers, or fails there."""

    def __init__(self, name: str, path: str, model: Any, *, peft_config: Any = None, fails: Any = None) -> None:
        self.module = importlib.import_module(path)
        trainer_class: Any = getattr(self.module, f"{name}Trainer")
        made = self

        class Parent(*trainer_class.__bases__):  # type: ignore[misc]
            def __init__(self, *, model: Any, **unused: Any) -> None:
                made.model = model
                raise fails or StopConstruction

        class Stub(trainer_class, Parent):  # type: ignore[misc]
            def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
                return dataset

        self.trainer: Any = object.__new__(Stub)
        arguments = {"train_dataset": Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})}
        if "reward_funcs" in inspect.signature(trainer_class.__init__).parameters:
            arguments["reward_funcs"] = len
        shadows: dict[str, Callable[..., Any]] = {"set_seed": lambda *args, **kwargs: None}
        shadows["get_peft_model"] = self.make_adapter
        with ExitStack() as stack:
            stack.enter_context(single_process(self.module))
            for attribute in [attribute for attribute in shadows if hasattr(self.module, attribute)]:
                stack.enter_context(shadowed(self.module, attribute, shadows[attribute]))
            with suppress(StopConstruction):
                Stub.__init__(
                    self.trainer,
                    model=model,
                    args=self._arguments(name),
                    processing_class=tiny_tokenizer(),
                    peft_config=peft_config,
                    **arguments,
                )
            self.get_peft_model = self.module.get_peft_model

    @staticmethod
    def make_adapter(model: Any, config: LoraConfig, **options: Any) -> Any:
        return with_adapter(model, config)

    def _arguments(self, name: str) -> SimpleNamespace:
        one_device: dict[str, Any] = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO")}
        one_device |= {"eval_strategy": "no", "deepspeed_plugin": None, "bf16": False, "gradient_checkpointing": False}
        # What a config works out after it was made; without a beta GRPO has no reference.
        generates = {"steps_per_generation": 1, "generation_batch_size": 8, "beta": 0.0}
        own: dict[str, dict[str, Any]] = {
            "SFT": {"loss_type": "nll"},
            "GRPO": {"loss_type": "grpo", **generates},
            "RLOO": generates,
        }
        return default_arguments(getattr(self.module, f"{name}Config"), **one_device, **own.get(name, {}))


def made(name: str, path: str, *, given: bool, quantised: bool = True, use_dora: bool = True) -> Made:
    model = model_of(given=given, quantised=quantised, use_dora=use_dora)
    return Made(name, path, model, peft_config=None if given else dora(use_dora=use_dora))


@each_trainer
@each_adapter
def test_magnitudes_have_their_own_numbers_in_float32(name: str, path: str, given: bool) -> None:
    run = made(name, path, given=given)
    for weight, number in zip(magnitudes(run.model), NUMBERS, strict=True):
        assert weight.dtype == torch.float32
        assert weight.requires_grad
        assert weight.eq(number).all()


@each_trainer
@each_adapter
def test_trl_casts_the_magnitudes(name: str, path: str, given: bool, switch: Any) -> None:
    with switch.off():
        assert dtypes(magnitudes(made(name, path, given=given).model)) == {torch.bfloat16}


@each_trainer
@each_adapter
@pytest.mark.parametrize("use_dora", [True, False], ids=["DoRA", "LoRA"])
def test_matrices_are_in_bfloat16_and_what_is_not_trained_is_in_float32(
    name: str, path: str, given: bool, use_dora: bool
) -> None:
    run = made(name, path, given=given, use_dora=use_dora)
    assert dtypes(weights(run.model, "lora_A.default") + weights(run.model, "lora_B.default")) == {torch.bfloat16}
    assert dtypes(weights(run.model, "base_layer") + weights(run.model, ".beside")) == {torch.float32}


@each_trainer
@each_adapter
def test_a_model_that_is_not_quantised_keeps_its_dtypes(name: str, path: str, given: bool) -> None:
    run = made(name, path, given=given, quantised=False)
    assert dtypes(list(run.model.parameters())) == {torch.float32}


@each_trainer
def test_each_trainer_keeps_the_magnitudes_of_its_own_model(name: str, path: str) -> None:
    first, second = (made(name, path, given=given) for given in (True, False))
    for run in (first, second):
        assert dtypes(magnitudes(run.model)) == {torch.float32}


@each_trainer
@each_adapter
def test_the_module_has_its_own_function_afterwards(name: str, path: str, given: bool) -> None:
    assert made(name, path, given=given).get_peft_model is Made.make_adapter


@each_trainer
def test_the_model_of_the_user_has_its_magnitudes_after_an_error(name: str, path: str) -> None:
    model = model_of(given=True)
    with pytest.raises(ArithmeticError):
        Made(name, path, model, fails=ArithmeticError)
    for weight, number in zip(magnitudes(model), NUMBERS, strict=True):
        assert weight.dtype == torch.float32
        assert weight.eq(number).all()


@pytest.mark.parametrize("cast", [True, False])
def test_it_acts_where_magnitudes_are_cast(cast: bool) -> None:
    def make(model: Any) -> None:
        for weight in magnitudes(model) if cast else ():
            weight.data = weight.data.to(torch.bfloat16)

    make.__module__ = MODULES["SFT"]
    call = Call(make, None, (model_of(given=True),))
    keep_magnitudes(call)
    assert call.acted is cast


def test_a_model_may_be_given_by_its_name() -> None:
    def make(model: str) -> str:
        return model

    make.__module__ = MODULES["SFT"]
    call = Call(make, None, ("some/model",))
    assert keep_magnitudes(call) == "some/model"
    assert not call.acted
