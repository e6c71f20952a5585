"""Experts that LoRA is to be on and is not get one line; other models and adapters get none."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from trl_hotfix.testing import stub_trainer

import tiny

ID = "lora-skips-fused-experts"
MODULE = importlib.import_module("trl.trainer.base_trainer")
CLASS = getattr(MODULE, "_BaseTrainer", None) or MODULE.BaseTrainer
TARGET = f"trl.trainer.base_trainer:{CLASS.__name__}.create_optimizer"
SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}


def qwen2_moe(kind: Any = None) -> Any:
    """Return a mixture of experts that also has a shared expert, whose experts PEFT finds in no version."""
    config = transformers.Qwen2MoeConfig(**SIZES, **HEADS, **EXPERTS, shared_expert_intermediate_size=4, num_labels=1)
    return (kind or transformers.AutoModelForCausalLM).from_config(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def with_lora(model: Any, targets: Any, **settings: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=targets, **settings))


def only_experts(config: Any) -> Any:
    """Return a mixture of experts whose other linear layers are gone, with an adapter that is not LoRA."""
    model = peft.get_peft_model(qwen2_moe(), config)
    for module in list(model.get_base_model().modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, torch.nn.Identity())
    return model


def stub(model: Any, *, main: bool = True) -> Any:
    """Return a trainer that is about to make its optimizer."""
    trainer = stub_trainer(CLASS, SimpleNamespace(), optimizer="the user's", model=model)
    trainer.accelerator = SimpleNamespace(is_main_process=main)
    return trainer


def line(count: int = 4, first: str = "model.layers.0.mlp.experts.down_proj") -> str:
    return (
        f"{CLASS.__name__}: {count} tensors of experts have no adapter, such as {first}. LoRA's target_modules ask for "
        "linear layers, and transformers 5 keeps the experts of a layer in one parameter. Only the other layers are "
        "trained. To train the experts: LoraConfig(target_parameters=['mlp.experts.down_proj', "
        "'mlp.experts.gate_up_proj'])"
    )


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["gate_proj", "up_proj", "down_proj"], ["q_proj", "up_proj"], ["mlp.shared_expert.down_proj"]],
    ids=["all", "experts", "attention and experts", "paths"],
)
def test_skipped_experts_are_reported(messages: list[str], targets: Any) -> None:
    trainer = stub(with_lora(qwen2_moe(), targets, task_type="CAUSAL_LM"))
    assert trainer.create_optimizer() == "the user's"
    assert messages == [line()]
    assert tiny.acts(ID, TARGET, trainer) == 1


def test_the_parameters_that_it_names_reach_the_experts(messages: list[str]) -> None:
    if not hasattr(peft.LoraConfig(), "target_parameters"):
        pytest.skip("this PEFT has no target_parameters")
    names = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    model = with_lora(qwen2_moe(), "all-linear", task_type="CAUSAL_LM", target_parameters=names)
    stub(model).create_optimizer()
    assert messages == []
    assert sum("mlp.experts" in name and ".lora_A" in name for name, _ in model.named_parameters()) == 4


def test_one_of_several_adapters_asks_for_them(messages: list[str]) -> None:
    model = with_lora(qwen2_moe(), ["q_proj"])
    model.add_adapter("second", peft.LoraConfig(r=1, target_modules=["v_proj", "up_proj"]))
    stub(model).create_optimizer()
    assert messages == [line()]


def test_a_model_with_a_score_is_reported(messages: list[str]) -> None:
    model = qwen2_moe(transformers.AutoModelForSequenceClassification)
    stub(with_lora(model, "all-linear", task_type="SEQ_CLS")).create_optimizer()
    assert messages == [line()]


def test_a_trainer_is_reported_once_and_another_one_again(messages: list[str]) -> None:
    first, second = (stub(with_lora(qwen2_moe(), "all-linear", task_type="CAUSAL_LM")) for _ in range(2))
    for trainer in (first, first, second):
        trainer.create_optimizer()
    assert messages == [line(), line()]


def test_a_model_without_a_shared_expert_is_reported(messages: list[str]) -> None:
    """Its adapters are all on the attention and the router, and the head has none."""
    model = qwen2_moe()
    for layer in model.model.layers:
        layer.mlp.shared_expert = layer.mlp.shared_expert_gate = torch.nn.Identity()
    stub(with_lora(model, "all-linear", task_type="CAUSAL_LM")).create_optimizer()
    assert messages == [line()]


def test_the_main_process_alone_says_it(messages: list[str]) -> None:
    trainer = stub(with_lora(qwen2_moe(), "all-linear", task_type="CAUSAL_LM"), main=False)
    trainer.create_optimizer()
    assert messages == []
    assert tiny.acts(ID, TARGET, trainer) == 1


def test_without_the_patch_there_is_no_line(messages: list[str], switch: Any) -> None:
    with switch.off():
        stub(with_lora(qwen2_moe(), "all-linear", task_type="CAUSAL_LM")).create_optimizer()
    assert messages == []


@pytest.mark.parametrize(
    "made",
    [
        lambda: with_lora(qwen2_moe(), ["q_proj", "v_proj"]),
        lambda: with_lora(qwen2_moe(), r".*self_attn\.(q|v)_proj"),
        lambda: with_lora(llama(), "all-linear", task_type="CAUSAL_LM"),
        lambda: with_lora(llama(), ["up_proj"]),
        lambda: peft.get_peft_model(qwen2_moe(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        lambda: only_experts(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        qwen2_moe,
        llama,
        lambda: torch.nn.Linear(1, 1),
    ],
    ids=[
        "attention",
        "a pattern",
        "dense",
        "dense by name",
        "prefix",
        "only experts",
        "no adapter",
        "dense without",
        "a layer",
    ],
)
def test_a_healthy_model_gets_no_line(messages: list[str], made: Any) -> None:
    trainer = stub(made())
    trainer.create_optimizer()
    assert messages == []
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_a_convolution_beside_all_linear_layers_is_no_expert(messages: list[str]) -> None:
    """Its weight has three dimensions, too."""
    model = llama()
    model.model.convolution = torch.nn.Conv1d(2, 2, 2)
    stub(with_lora(model, "all-linear", task_type="CAUSAL_LM")).create_optimizer()
    assert messages == []


def test_the_router_and_other_matrices_of_experts_are_no_fused_experts(messages: list[str]) -> None:
    class MoeRouter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 2))

    model = llama()
    model.model.router = MoeRouter()
    stub(with_lora(model, "all-linear", task_type="CAUSAL_LM")).create_optimizer()
    assert messages == []


def test_experts_in_a_class_called_moe_are_reported(messages: list[str]) -> None:
    class NaiveMoe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = torch.nn.Parameter(torch.zeros(2, 2, 2))

    model = llama()
    model.model.layers[1].mlp.experts = NaiveMoe()
    stub(with_lora(model, "all-linear", task_type="CAUSAL_LM")).create_optimizer()
    (found,) = messages
    assert "1 tensors of experts have no adapter, such as model.layers.1.mlp.experts.down_proj." in found
