"""What is trained on a quantised model has its own numbers in float32, and everything else is left as it is."""

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
from peft import IA3Config, LoraConfig, get_peft_model

from trl_hotfix.authoring import shadowed
from trl_hotfix.call import Call
from trl_hotfix.patches.adapters.qlora_adapter_frozen_in_bf16 import keep_in_float32
from trl_hotfix.testing import StopConstruction, base_for_adapters, default_arguments, single_process, tiny_tokenizer

NAMES = ("SFT", "GRPO", "Reward", "RLOO", "DPO", "KTO", "Distillation")
PATHS = [(name, f"trl.trainer.{name.lower()}_trainer") for name in NAMES]
PATHS.append(("KTO", "trl.experimental.kto.kto_trainer"))


def casts(name: str, path: str) -> bool:
    """Return whether this trainer is made here, and casts the adapters of a quantised model."""
    try:
        trainer_class = getattr(importlib.import_module(path), f"{name}Trainer")
    except (ImportError, AttributeError):
        return False
    constructor = inspect.unwrap(trainer_class.__init__)
    return (
        constructor.__module__ == path
        and {"bfloat16", "get_peft_model"} <= set(constructor.__code__.co_names)
        and "is_loaded_in_8bit" in str(constructor.__code__.co_consts)
    )


each_trainer = pytest.mark.parametrize(("name", "path"), [item for item in PATHS if casts(*item)])
each_adapter = pytest.mark.parametrize("given", [False, True], ids=["a new adapter", "one that there is"])
each_kind = pytest.mark.parametrize("kind", ["LoRA", "IA3"])
each_mark = pytest.mark.parametrize("mark", ["is_loaded_in_4bit", "is_loaded_in_8bit"])

NUMBERS = (3.3, 0.7, 1.1, 2.3)
"""Of the trained weights, one after the other. bfloat16 has none of them."""


def config_of(kind: str = "LoRA") -> Any:
    if kind == "IA3":
        return IA3Config(target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    return LoraConfig(r=1, target_modules=["q_proj", "v_proj"])


def with_adapter(model: Any, config: Any, *, dtype: Any = torch.float32) -> Any:
    model = get_peft_model(model, config)
    for weight, number in zip(trained(model), NUMBERS, strict=True):
        weight.data = torch.full_like(weight.data, number, dtype=dtype)
    return model


def trained(model: Any) -> list[Any]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def frozen(model: Any) -> list[Any]:
    return [weight for weight in model.parameters() if not weight.requires_grad]


def model_of(
    *, given: bool, mark: str | None = "is_loaded_in_8bit", kind: str = "LoRA", dtype: Any = torch.float32
) -> Any:
    base = base_for_adapters()
    base.config.num_labels = 1
    model = base
    if given:
        model = with_adapter(base, config_of(kind), dtype=dtype)
        model.add_adapter("beside", config_of(kind))
    if mark:
        setattr(base, mark, True)
    return model


class Made:
    """A trainer as its own constructor hands it to that of transformers, or fails there."""

    def __init__(
        self,
        name: str,
        path: str,
        model: Any,
        *,
        peft_config: Any = None,
        fails: Any = StopConstruction,
        sharded: str | None = None,
    ) -> None:
        self.module = importlib.import_module(path)
        trainer_class: Any = getattr(self.module, f"{name}Trainer")
        made = self

        class Parent(*trainer_class.__bases__):  # type: ignore[misc]
            def __init__(self, *, model: Any, **unused: Any) -> None:
                made.model = model
                if sharded:
                    setattr(self, sharded, True)
                raise fails

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
    def make_adapter(model: Any, config: Any, **options: Any) -> Any:
        # For a model with a mark PEFT asks bitsandbytes, which the stacks lack.
        marks = {name: vars(model).pop(name) for name in list(vars(model)) if name.startswith("is_loaded_in")}
        adapted = with_adapter(model, config)
        vars(model).update(marks)
        return adapted

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


def made(name: str, path: str, *, given: bool, kind: str = "LoRA", **options: Any) -> Made:
    made_with = {key: options.pop(key) for key in ("fails", "sharded") if key in options}
    model = model_of(given=given, kind=kind, **options)
    return Made(name, path, model, peft_config=None if given else config_of(kind), **made_with)


def assert_own_numbers(model: Any) -> None:
    for weight, number in zip(trained(model), NUMBERS, strict=True):
        assert weight.dtype == torch.float32
        assert weight.eq(number).all()


@each_trainer
@each_adapter
@each_kind
@each_mark
def test_the_adapter_has_its_own_numbers_in_float32(name: str, path: str, given: bool, kind: str, mark: str) -> None:
    assert_own_numbers(made(name, path, given=given, kind=kind, mark=mark).model)


@each_trainer
@each_adapter
def test_trl_casts_the_adapter(name: str, path: str, given: bool, switch: Any) -> None:
    with switch.off():
        run = made(name, path, given=given)
    assert {weight.dtype for weight in trained(run.model)} == {torch.bfloat16}
    assert not any(weight.float().eq(number).any() for weight, number in zip(trained(run.model), NUMBERS, strict=True))


@each_trainer
@each_adapter
def test_what_is_not_trained_keeps_its_dtype(name: str, path: str, given: bool) -> None:
    model = made(name, path, given=given).model
    assert {weight.dtype for weight in frozen(model)} == {torch.float32}


@each_trainer
@each_adapter
def test_a_model_that_is_not_quantised_keeps_its_dtypes(name: str, path: str, given: bool) -> None:
    assert_own_numbers(made(name, path, given=given, mark=None).model)


@each_trainer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_in_another_dtype_is_left_to_trl(name: str, path: str, dtype: Any) -> None:
    run = made(name, path, given=True, dtype=dtype)
    assert {weight.dtype for weight in trained(run.model)} == {torch.bfloat16}


@each_trainer
def test_magnitude_vectors_are_left_to_trl(name: str, path: str, switch: Any) -> None:
    def dtypes() -> tuple[set[Any], set[Any]]:
        base = base_for_adapters()
        model = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"], use_dora=True))
        base.is_loaded_in_8bit, base.config.num_labels = True, 1
        Made(name, path, model)
        magnitudes, others = set(), set()
        for key, weight in model.named_parameters():
            if weight.requires_grad:
                (magnitudes if "magnitude" in key else others).add(weight.dtype)
        return magnitudes, others

    patched = dtypes()
    with switch.off():
        plain = dtypes()
    assert patched[0] == plain[0]
    assert (patched[1], plain[1]) == ({torch.float32}, {torch.bfloat16})


@each_trainer
@each_adapter
@pytest.mark.parametrize("sharded", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_deepspeed_and_fsdp_have_it_in_bfloat16(name: str, path: str, given: bool, sharded: str) -> None:
    run = made(name, path, given=given, sharded=sharded)
    assert {weight.dtype for weight in trained(run.model)} == {torch.bfloat16}


@each_trainer
def test_each_trainer_keeps_the_adapter_of_its_own_model(name: str, path: str) -> None:
    for run in [made(name, path, given=given) for given in (True, False)]:
        assert_own_numbers(run.model)


@each_trainer
@each_adapter
def test_the_module_has_its_own_function_afterwards(name: str, path: str, given: bool) -> None:
    assert made(name, path, given=given).get_peft_model is Made.make_adapter


@each_trainer
def test_the_model_of_the_user_has_its_numbers_after_an_error(name: str, path: str) -> None:
    model = model_of(given=True)
    with pytest.raises(ArithmeticError):
        Made(name, path, model, fails=ArithmeticError)
    assert_own_numbers(model)


@pytest.mark.parametrize("cast", [True, False])
@each_mark
def test_it_acts_where_the_adapter_is_cast(cast: bool, mark: str) -> None:
    def make(model: Any) -> None:
        for weight in trained(model) if cast else ():
            weight.data = weight.data.to(torch.bfloat16)

    make.__module__ = PATHS[0][1]
    model = model_of(given=True, mark=mark)
    call = Call(make, None, (model,))
    keep_in_float32(call)
    assert call.acted is cast
    assert_own_numbers(model)


def test_weights_go_where_the_trainer_has_put_them() -> None:
    class Weight:
        """A weight that may go to another kind of device: a parameter of a CPU cannot."""

        requires_grad = True
        data = torch.ones(2)
        dtype, device = property(lambda self: self.data.dtype), property(lambda self: self.data.device)

    def make(model: Any) -> None:
        weight.data = torch.ones(2, dtype=torch.bfloat16, device="meta")

    make.__module__ = PATHS[0][1]
    weight = Weight()
    keep_in_float32(
        Call(make, None, (SimpleNamespace(is_loaded_in_4bit=True, named_parameters=lambda: [("lora_A", weight)]),))
    )
    assert (weight.device.type, weight.dtype) == ("meta", torch.float32)


def test_a_model_may_be_given_by_its_name() -> None:
    def make(model: str) -> str:
        return model

    make.__module__ = PATHS[0][1]
    call = Call(make, None, ("some/model",))
    assert keep_in_float32(call) == "some/model"
    assert not call.acted
