"""Weights that train in bfloat16 get one line, or are float32 before the optimizer is made; others get none."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trl_hotfix.testing import stub_trainer

import tiny

ID = "weights-in-bf16-updates-vanish"
MODULE = importlib.import_module("trl.trainer.base_trainer")
CLASS = getattr(MODULE, "_BaseTrainer", None) or MODULE.BaseTrainer
TARGET = f"trl.trainer.base_trainer:{CLASS.__name__}.create_optimizer"


def layers(*dtypes: torch.dtype, frozen: tuple[int, ...] = ()) -> Any:
    """Return layers of a weight each, in these dtypes."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False, dtype=dtype) for dtype in dtypes))
    for number in frozen:
        model[number].weight.requires_grad_(False)
    return model


def stub(model: Any, *, main: bool = True, **state: Any) -> Any:
    """Return a trainer that is about to make its optimizer."""
    kept = {"optimizer": "the user's", "is_deepspeed_enabled": False, "is_fsdp_enabled": False, "ref_model": None}
    trainer = stub_trainer(CLASS, SimpleNamespace(save_safetensors=True), model=model, **{**kept, **state})
    trainer.accelerator = SimpleNamespace(is_main_process=main)
    return trainer


BF16, F32 = torch.bfloat16, torch.float32


def test_weights_in_bf16_are_reported_with_what_to_do(messages: list[str]) -> None:
    model = layers(BF16, BF16, F32)
    trainer = stub(model)
    assert trainer.create_optimizer() == "the user's"
    assert messages == [
        f"{CLASS.__name__}: 2 of 3 parameter tensors that are trained are in bfloat16, and an update of less than a "
        "512th of a weight rounds to nothing, also with bf16=True. transformers 5 loads a checkpoint in its own dtype: "
        "load the model with dtype=torch.float32, or set "
        "TRL_HOTFIX_OPTIONS=weights-in-bf16-updates-vanish.weights=float32"
    ]
    assert [weight.dtype for weight in model.parameters()] == [BF16, BF16, F32]
    assert tiny.acts(ID, TARGET, trainer) == 1


def test_a_trainer_is_reported_once_and_another_one_again(messages: list[str]) -> None:
    first, second = stub(layers(BF16)), stub(layers(BF16))
    for trainer in (first, first, second):
        trainer.create_optimizer()
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("model", "state"),
    [
        (layers(F32, F32), {}),
        (layers(torch.float16), {}),
        (layers(BF16, F32, frozen=(0,)), {}),
        (layers(BF16), {"is_deepspeed_enabled": True}),
        (layers(BF16), {"is_fsdp_enabled": True}),
    ],
    ids=["float32", "float16", "an adapter in float32", "DeepSpeed", "FSDP"],
)
def test_a_healthy_run_gets_no_line_and_no_cast(
    messages: list[str], switch: Any, model: Any, state: dict[str, Any]
) -> None:
    before = [weight.dtype for weight in model.parameters()]
    trainer = stub(model, **state)
    trainer.create_optimizer()
    with switch.on(weights="float32"):
        stub(model, **state).create_optimizer()
    assert messages == []
    assert [weight.dtype for weight in model.parameters()] == before
    assert not tiny.acts(ID, TARGET, trainer)


def test_the_main_process_alone_says_it(messages: list[str]) -> None:
    stub(layers(BF16), main=False).create_optimizer()
    assert messages == []


def test_without_the_patch_there_is_no_line(messages: list[str], switch: Any) -> None:
    with switch.off():
        stub(layers(BF16)).create_optimizer()
    assert messages == []


def test_with_the_option_model_and_reference_are_float32(messages: list[str], switch: Any) -> None:
    model, reference = layers(BF16, F32, BF16, frozen=(2,)), layers(BF16, frozen=(0,))
    model.register_buffer("table", torch.ones(1, dtype=BF16))
    parameters, values = list(model.parameters()), [float(weight) for weight in model.parameters()]
    with switch.on(weights="float32"):
        stub(model, ref_model=reference).create_optimizer()
    assert messages == []
    assert {value.dtype for each in (model, reference) for value in each.state_dict().values()} == {F32}
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert [float(weight) for weight in model.parameters()] == values
    assert [weight.requires_grad for weight in model.parameters()] == [True, True, False]


def test_of_a_model_with_an_adapter_the_adapter_alone_is_cast(switch: Any) -> None:
    model = layers(BF16, BF16, frozen=(0,))
    model.peft_config = {}
    reference = layers(BF16)
    with switch.on(weights="float32"):
        stub(model, ref_model=reference).create_optimizer()
    assert [weight.dtype for weight in model.parameters()] == [BF16, F32]
    assert reference[0].weight.dtype is BF16


@pytest.mark.parametrize("weights", ["as-loaded", "float32"])
def test_a_resumed_run_keeps_what_the_checkpoint_has_in_float32(
    messages: list[str], switch: Any, weights: str, tmp_path: Any
) -> None:
    value = 1 + 2**-12
    model = layers(BF16)
    save_file({"0.weight": torch.full((1, 1), value)}, tmp_path / "model.safetensors")
    with switch.on(weights=weights):
        stub(model)._load_from_checkpoint(str(tmp_path))
    assert float(model[0].weight) == (value if weights == "float32" else 1.0)
    assert messages == []


def test_a_resumed_run_in_another_dtype_stays_in_it(switch: Any, tmp_path: Any) -> None:
    model = layers(torch.float16)
    save_file({"0.weight": torch.full((1, 1), 0.5, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with switch.on(weights="float32"):
        stub(model)._load_from_checkpoint(str(tmp_path))
    assert model[0].weight.dtype is torch.float16
