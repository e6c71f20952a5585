"""The head of a reward model trains beside a soft prompt, and a resumed run goes on from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from trl import RewardConfig, RewardTrainer

import tiny
from tiny import every_trainer

ID = "reward-prompt-tuning-head-not-saved"
TARGET = "trl.trainer.reward_trainer:RewardTrainer.__init__"
SOFT_PROMPTS = ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig")


def trainer_with(adapter: Any, model: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    words = tiny.tokenizer()
    return tiny.trainer(
        RewardTrainer,
        model=model or every_trainer._classifier("Reward"),
        args=tiny.config(RewardConfig, learning_rate=0.1, **settings),
        train_dataset=every_trainer._data("Reward", words),
        tokenizer=words,
        peft_config=adapter,
    )


def soft_prompt(kind: str = "PromptTuningConfig", task: str | None = "SEQ_CLS") -> Any:
    return getattr(peft, kind)(task_type=task, num_virtual_tokens=2)


def heads(model: Any) -> list[Any]:
    return [weight for name, weight in model.named_parameters() if "score" in name and "original" not in name]


@pytest.mark.parametrize("kind", SOFT_PROMPTS)
def test_the_head_trains(kind: str) -> None:
    trainer = trainer_with(soft_prompt(kind))
    (head,) = heads(trainer.model)
    before = head.detach().clone()
    trainer.train()
    assert head.requires_grad
    assert not head.equal(before)
    assert tiny.acts(ID, TARGET, trainer) == 1


@pytest.mark.parametrize("kind", SOFT_PROMPTS)
def test_peft_leaves_the_head_frozen(kind: str, switch: Any) -> None:
    with switch.off():
        trainer = trainer_with(soft_prompt(kind))
    assert not any(head.requires_grad for head in heads(trainer.model))


def test_a_resumed_run_goes_on_from_the_head(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    trainer = trainer_with(soft_prompt(), **settings)
    trainer.train()
    resumed = trainer_with(soft_prompt(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(heads(resumed.model), heads(trainer.model))


def test_the_config_of_the_user_stays_as_it_is() -> None:
    config = soft_prompt()
    before = copy.deepcopy(vars(config))
    trainer_with(config)
    assert vars(config) == before


def test_lora_and_no_adapter_are_left_alone() -> None:
    for adapter in (peft.LoraConfig(task_type="SEQ_CLS"), None):
        assert not tiny.acts(ID, TARGET, trainer_with(adapter))


def test_a_soft_prompt_for_another_task_is_left_alone() -> None:
    # PEFT 0.17 has no head in it either.
    trainer = trainer_with(soft_prompt(task="FEATURE_EXTRACTION"))
    assert not any(head.requires_grad for head in heads(trainer.model))
    assert not tiny.acts(ID, TARGET, trainer)
