"""A new adapter is put on a base into which the old one is merged, and other models are made as TRL does."""

from __future__ import annotations

import inspect
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tqdm import tqdm
from trl.trainer import grpo_trainer, sft_trainer

from trl_hotfix.testing import StopConstruction, base_and_lora, default_arguments, single_process, tiny_tokenizer

NEW_LORA = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
TOKENS = torch.tensor([[2, 3, 4, 5, 6], [7, 1, 2, 6, 3]])


@pytest.fixture(params=[grpo_trainer, sft_trainer], ids=["GRPO", "SFT"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # The merge makes a progress bar, whose thread would stay.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    found: ModuleType = request.param
    if found is sft_trainer:
        method = getattr(sft_trainer.SFTTrainer, "_prepare_peft_model", None)
        if method is None or "get_peft_model" not in inspect.unwrap(method).__code__.co_names:
            pytest.skip("SFT of this release has no such method")
        if not _is_given_a_new_adapter(found):
            pytest.skip("SFT of this release leaves a PeftModel as it is")
    return found


def _is_given_a_new_adapter(module: ModuleType) -> bool:
    model = trained()
    return made(module, model) is not model


def fill(weights: Any) -> None:
    """Set weights to fixed values, all of them other than 0."""
    for number, weight in enumerate(weights):
        weight.data = 0.5 * torch.cos(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)


def base() -> Any:
    model, _ = base_and_lora()
    fill(model.parameters())
    return model


def trained(name: str = "default") -> Any:
    """Return a model with a trained adapter of this name."""
    model = get_peft_model(base(), base_and_lora()[1], adapter_name=name)
    fill(weight for weight in model.parameters() if weight.requires_grad)
    return model


def merged_by_hand(model: Any, name: str) -> Any:
    """Return a base whose weights are W + B A alpha / r, with a new adapter."""
    merged, weights = base(), model.state_dict()
    for module_name, layer in merged.named_modules():
        prefix = f"base_model.model.{module_name}"
        if f"{prefix}.lora_A.{name}.weight" in weights:
            lora = model.peft_config[name]
            product = weights[f"{prefix}.lora_B.{name}.weight"] @ weights[f"{prefix}.lora_A.{name}.weight"]
            layer.weight.data += product * lora.lora_alpha / lora.r
    return get_peft_model(merged, NEW_LORA)


def made(module: ModuleType, model: Any, peft_config: Any = NEW_LORA) -> Any:
    """Return the model that the real method makes of ``model``: GRPO's constructor, as far as that of transformers."""
    if module is sft_trainer:
        settings = SimpleNamespace(bf16=False, gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
        return object.__new__(module.SFTTrainer)._prepare_peft_model(model, peft_config, settings)

    class Parent(*module.GRPOTrainer.__bases__):  # type: ignore[misc]
        def __init__(self, model: Any, **unused: Any) -> None:
            self.model = model
            # This is what another thread does.
            other, lora = base_and_lora()
            assert module.get_peft_model(other, lora).get_base_model() is other
            raise StopConstruction

    class Trainer(module.GRPOTrainer, Parent):  # type: ignore[misc, name-defined]
        pass

    settings = default_arguments(module.GRPOConfig, gradient_checkpointing=False)
    trainer: Any = object.__new__(Trainer)
    with single_process(module), suppress(StopConstruction):
        trainer.__init__(model, len, settings, processing_class=tiny_tokenizer(), peft_config=peft_config)
    return trainer.model


def log_probs(model: Any) -> Any:
    return model(input_ids=TOKENS).logits.log_softmax(-1)


def gradients(model: Any) -> dict[str, Any]:
    """Return the gradients of what is trained, at fixed values."""
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    fill(trainable.values())
    log_probs(model)[:, :, 3].sum().backward()
    return {name: weight.grad for name, weight in trainable.items()}


each_name = pytest.mark.parametrize("name", ["default", "policy"])


@each_name
def test_the_model_begins_where_the_old_adapter_ended(module: ModuleType, name: str) -> None:
    model = trained(name)
    expected = merged_by_hand(model, name)
    found = made(module, model)
    torch.testing.assert_close(log_probs(found), log_probs(expected))
    assert list(found.peft_config) == ["default"]
    assert found.active_adapter == "default"


@each_name
def test_without_adapters_it_is_the_merged_base_too(module: ModuleType, name: str) -> None:
    model = trained(name)
    expected = merged_by_hand(model, name)
    found = made(module, model)
    with found.disable_adapter(), expected.disable_adapter():
        torch.testing.assert_close(log_probs(found), log_probs(expected))


@each_name
def test_the_new_adapter_alone_is_trained(module: ModuleType, name: str) -> None:
    model = trained(name)
    right = gradients(merged_by_hand(model, name))
    found = gradients(made(module, model))
    assert found.keys() == right.keys()
    for weight, gradient in right.items():
        torch.testing.assert_close(found[weight], gradient, rtol=1e-4, atol=1e-5)
        assert gradient.any()


@each_name
def test_trl_loses_the_old_adapter(module: ModuleType, name: str, switch: Any) -> None:
    with switch.off():
        found = made(module, trained(name))
    torch.testing.assert_close(log_probs(found), log_probs(base()))


def test_each_trainer_begins_there(module: ModuleType) -> None:
    expected = log_probs(merged_by_hand(trained(), "default"))
    for _ in range(2):
        torch.testing.assert_close(log_probs(made(module, trained())), expected)


def test_the_merged_base_does_not_know_the_old_adapter(module: ModuleType) -> None:
    # It would be saved with the new one, without weights.
    found = made(module, trained("policy")).get_base_model()
    assert "policy" not in getattr(found, "peft_config", {})


def test_without_a_config_the_model_is_left_as_it_is(module: ModuleType) -> None:
    model = trained()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert made(module, model, None) is model
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


def test_a_model_without_an_adapter_is_given_one_as_it_is(module: ModuleType) -> None:
    model = base()
    found = made(module, model)
    assert found.get_base_model() is model
    torch.testing.assert_close(log_probs(found), log_probs(base()))


def test_the_module_keeps_the_function_of_peft(module: ModuleType) -> None:
    made(module, trained())
    assert module.get_peft_model is peft.get_peft_model


def test_an_adapter_that_cannot_be_merged_is_refused(module: ModuleType) -> None:
    model = get_peft_model(base(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=1))
    with pytest.raises(ValueError, match=r"its adapter \(PromptTuningConfig\) cannot be merged"):
        made(module, model)
    assert module.get_peft_model is peft.get_peft_model
