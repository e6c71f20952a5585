"""Advantages are scaled as ``scale_rewards`` says, the metrics are of the same setting, and the trainer keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import scored_completions, stub_grpo_trainer, stub_that_scores, tiny_causal_lm

import tiny

ID = "grpo-scale-rewards-swapped"
GROUP = 3
COMPLETIONS = ((5, 1), (10, 3, 4, 6, 1), (8, 9, 1), (1,), (7, 4, 9, 11, 3, 1), (3, 10, 4, 1))
FIRST = (0.0, 1.0, 5.0, 10.0, 0.0, 40.0)
SECOND = (7.0, 30.0, 2.0, 1.5, 1.0, 2.0)
WITH_EQUALS = (2.0, 2.0, 2.0, 20.0, 10.0, 0.0)
EQUAL = (3.0,) * 6
"""The rewards of two groups. In the third a group has no deviation, in the last the batch has none."""

AS_ASKED = {"group": ("group", "group"), "batch": ("batch", "batch"), "none": ("none", "group")}
IN_TRL = {"group": ("none", "batch"), "batch": ("group", "group"), "none": ("group", "group")}
"""How each setting scales the advantages, and whose deviation is logged."""

settings = pytest.mark.parametrize("setting", ["group", "batch", "none"])
generations = pytest.mark.parametrize("rewards", [FIRST, SECOND, WITH_EQUALS, EQUAL])
each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def stub(setting: Any, *, training: bool = True) -> Any:
    model = tiny_causal_lm(vocabulary=16)
    trainer = stub_that_scores(
        grpo_trainer,
        COMPLETIONS,
        [0.0] * len(COMPLETIONS),
        model=model,
        reference=model,
        training=training,
        num_generations=GROUP,
        num_generations_eval=GROUP,
        beta=0.0,
        scale_rewards=setting,
    )
    # The constructor has it from the arguments.
    trainer.scale_rewards = setting
    return trainer


def scored(trainer: Any, rewards: Sequence[float]) -> dict[str, Any]:
    trainer.reward_funcs = [lambda **kwargs: list(rewards)]
    return scored_completions(trainer)


def acts(trainer: Any) -> int | None:
    return tiny.acts(ID, "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions", trainer)


def deviations(rewards: Sequence[float], whose: str) -> list[float]:
    """Return the standard deviation of the group, or of the batch, of each reward."""
    if whose == "batch":
        return [statistics.stdev(rewards)] * len(rewards)
    groups = [rewards[start : start + GROUP] for start in range(0, len(rewards), GROUP)]
    return [statistics.stdev(group) for group in groups for _ in group]


def advantages(rewards: Sequence[float], scaling: str) -> torch.Tensor:
    """Return the rewards without the mean of their group (DeepSeekMath, arXiv:2402.03300), scaled."""
    groups = torch.tensor(rewards).view(-1, GROUP)
    centred = (groups - groups.mean(1, keepdim=True)).flatten()
    # TRL adds 1e-4 to the deviation.
    return centred if scaling == "none" else centred / (torch.tensor(deviations(rewards, scaling)) + 1e-4)


def assert_scaled(trainer: Any, rewards: Sequence[float], scaling: str, whose: str) -> None:
    """Check the advantages of a generation, and what is logged of it."""
    found, right = scored(trainer, rewards)["advantages"], advantages(rewards, scaling)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])[-len(rewards) :]), right)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    measured = deviations(rewards, whose)
    assert metrics["reward_std"][-1] == pytest.approx(statistics.mean(measured), abs=1e-6)
    assert metrics["frac_reward_zero_std"][-1] == pytest.approx(statistics.mean(each == 0 for each in measured))


@settings
@generations
@each_mode
def test_advantages_and_metrics_are_those_of_the_setting(setting: str, rewards: Any, training: bool) -> None:
    trainer = stub(setting, training=training)
    assert_scaled(trainer, rewards, *AS_ASKED[setting])
    assert acts(trainer) == 1


@settings
@generations
@each_mode
def test_trl_has_another_scale(setting: str, rewards: Any, training: bool, switch: Any) -> None:
    with switch.off():
        assert_scaled(stub(setting, training=training), rewards, *IN_TRL[setting])


def test_each_generation_of_each_trainer_is_scaled_as_its_setting_says() -> None:
    trainers = {setting: stub(setting) for setting in AS_ASKED}
    for step, rewards in enumerate((FIRST, WITH_EQUALS, SECOND)):
        for setting, trainer in trainers.items():
            trainer.state.global_step = step
            trainer.model.train(step != 1)
            assert_scaled(trainer, rewards, *AS_ASKED[setting])


@settings
@pytest.mark.parametrize("rewards", [FIRST, WITH_EQUALS])
def test_the_loss_and_its_gradient_are_those_of_the_setting(setting: str, rewards: Any) -> None:
    output = scored(stub(setting), rewards)
    mask = output["completion_mask"]
    assert mask.sum(1).tolist() == [len(completion) for completion in COMPLETIONS]
    log_probs = torch.full(mask.shape, -0.5, requires_grad=True)
    trainer = stub_grpo_trainer(grpo_trainer, log_probs, loss_type="bnpo", beta=0.0)
    # The ratio of the probabilities is 1. Its gradient is that of the log-probs.
    ratio = (log_probs - log_probs.detach()).exp()
    right = -(advantages(rewards, AS_ASKED[setting][0])[:, None] * ratio * mask).sum() / mask.sum()
    loss = trainer._compute_loss(None, output)
    torch.testing.assert_close(loss, right)
    gradients = (torch.autograd.grad(each, log_probs)[0] for each in (loss, right))
    torch.testing.assert_close(*gradients)


@settings
def test_a_reward_function_finds_the_users_setting(setting: str) -> None:
    found = []

    def rate(**kwargs: Any) -> list[float]:
        found.append(trainer.scale_rewards)
        return list(FIRST)

    trainer = stub(setting)
    trainer.reward_funcs = [rate]
    for _ in range(2):
        scored_completions(trainer)
    assert found == [setting] * 2


@settings
def test_the_trainer_keeps_its_setting(setting: str) -> None:
    trainer = stub(setting)
    scored(trainer, FIRST)
    assert vars(trainer)["scale_rewards"] is setting
    assert "_calculate_rewards" not in vars(trainer)


@settings
def test_the_trainer_keeps_its_setting_after_an_error(setting: str) -> None:
    trainer = stub(setting)
    # The metrics come after the rewards.
    trainer._metrics = None
    with pytest.raises(TypeError):
        scored(trainer, FIRST)
    assert vars(trainer)["scale_rewards"] is setting
    assert "_calculate_rewards" not in vars(trainer)


def test_an_unknown_setting_is_trls_error() -> None:
    trainer = stub("batches")
    with pytest.raises(ValueError, match="Invalid value for scale_rewards: batches"):
        scored(trainer, FIRST)
    assert trainer.scale_rewards == "batches"
