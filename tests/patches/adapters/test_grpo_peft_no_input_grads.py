"""Every matrix of LoRA has the gradient that it has without checkpoints, and other models have no hook."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import get_peft_model
from trl import __version__ as release

from trl_hotfix.authoring import shadowed
from trl_hotfix.testing import (
    as_tokenizer_of,
    base_and_lora,
    constructed,
    default_arguments,
    lora_gradients,
    single_process,
)

import tiny

ID = "grpo-peft-no-input-grads"
TARGETS = {
    "GRPO": "trl.trainer.grpo_trainer:GRPOTrainer.__init__",
    "OnlineDPO": "trl.trainer.online_dpo_trainer:OnlineDPOTrainer.__init__",
}
REENTRANT = {"use_reentrant": True}

NAMES = ["OnlineDPO", *(["GRPO"] if Version("0.14.0") <= Version(release) < Version("0.16.0") else [])]

pytestmark = pytest.mark.parametrize("name", NAMES)

ways_to_be_reentrant = pytest.mark.parametrize("options", [REENTRANT, {}, None], ids=str)


class Rows:
    """A dataset that stays as it is. 0.11 tokenises it."""

    def map(self, *args: Any, **kwargs: Any) -> Rows:
        return self


def trainer_of(name: str, model: Any, peft_config: Any = None, **settings: Any) -> Any:
    """Return a trainer whose own constructor has run."""
    module = importlib.import_module(TARGETS[name].partition(":")[0])
    trainer_class = getattr(module, f"{name}Trainer")
    of_method: dict[str, dict[str, Any]] = {
        "GRPO": {"per_device_train_batch_size": 8, "eval_strategy": "no", "bf16": False},
        "OnlineDPO": {"missing_eos_penalty": None, "use_vllm": False},
    }
    rewards = {"GRPO": {"reward_funcs": []}, "OnlineDPO": {"reward_model": torch.nn.Identity()}}
    with single_process(module), shadowed(module, "set_seed", lambda *args, **kwargs: None):
        return constructed(
            trainer_class,
            model=model,
            args=default_arguments(getattr(module, f"{name}Config"), **of_method[name], **settings),
            train_dataset=Rows(),
            peft_config=peft_config,
            **as_tokenizer_of(trainer_class, SimpleNamespace(pad_token_id=0, eos_token_id=1)),
            **rewards[name],
        )


def checkpointed(options: Any) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}


def hooks(trainer: Any) -> int:
    return len(trainer.model.get_input_embeddings()._forward_hooks)


def acts(name: str, trainer: Any) -> int | None:
    return tiny.acts(ID, TARGETS[name], trainer)


def reached(gradients: dict[str, Any]) -> set[str]:
    return {name for name, gradient in gradients.items() if gradient.any()}


@ways_to_be_reentrant
def test_every_matrix_has_the_gradient_that_it_has_without_checkpoints(name: str, options: Any) -> None:
    trainer = trainer_of(name, *base_and_lora(), **checkpointed(options))
    gradients = lora_gradients(trainer.model, options or REENTRANT)
    expected = lora_gradients(trainer_of(name, *base_and_lora(), gradient_checkpointing=False).model, None)
    assert reached(gradients) == set(expected)
    assert len(expected) == 4
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[key], gradient)
    assert acts(name, trainer) == 1


@ways_to_be_reentrant
def test_trl_trains_what_is_behind_the_decoder_alone(name: str, options: Any, switch: Any) -> None:
    with switch.off():
        trainer = trainer_of(name, *base_and_lora(), **checkpointed(options))
    gradients = reached(lora_gradients(trainer.model, options or REENTRANT))
    assert len(gradients) == 2
    assert all("lm_head" in key for key in gradients)


@ways_to_be_reentrant
def test_the_embeddings_have_one_hook(name: str, options: Any) -> None:
    assert hooks(trainer_of(name, *base_and_lora(), **checkpointed(options))) == 1


def test_an_adapter_that_comes_with_the_model_has_its_gradients_too(name: str) -> None:
    trainer = trainer_of(name, get_peft_model(*base_and_lora()), **checkpointed(REENTRANT))
    assert len(reached(lora_gradients(trainer.model, REENTRANT))) == 4
    assert acts(name, trainer) == 1


def test_each_of_two_trainers_has_its_gradients(name: str) -> None:
    for _ in range(2):
        trainer = trainer_of(name, *base_and_lora(), **checkpointed(REENTRANT))
        assert len(reached(lora_gradients(trainer.model, REENTRANT))) == 4
        assert acts(name, trainer) == 1


def test_the_embeddings_stay_frozen(name: str) -> None:
    trainer = trainer_of(name, *base_and_lora(), **checkpointed(REENTRANT))
    trained = {key for key, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert {"lora_" in key for key in trained} == {True}


def test_an_evaluation_needs_no_gradient(name: str) -> None:
    trainer = trainer_of(name, *base_and_lora(), **checkpointed(REENTRANT))
    tokens = torch.tensor([[2, 3, 4], [5, 6, 7]])
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=tokens).logits
        trainer.model.get_input_embeddings()._forward_hooks.clear()
        assert logits.equal(trainer.model(input_ids=tokens).logits)
    assert not logits.requires_grad


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": REENTRANT},
        checkpointed({"use_reentrant": False}),
    ],
    ids=["no checkpoints", "options of none", "not reentrant"],
)
def test_an_adapter_without_reentrant_checkpoints_has_no_hook(name: str, settings: dict[str, Any]) -> None:
    trainer = trainer_of(name, *base_and_lora(), **settings)
    assert (hooks(trainer), acts(name, trainer)) == (0, 0)


@ways_to_be_reentrant
def test_full_fine_tuning_has_no_hook(name: str, options: Any) -> None:
    model, _ = base_and_lora()
    trainer = trainer_of(name, model, **checkpointed(options))
    assert (hooks(trainer), acts(name, trainer)) == (0, 0)
