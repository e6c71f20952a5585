"""Each diagnosis from its numbers alone; the real runs are in tests/proofs/grpo_zero_loss_diagnosis.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.patches import grpo_zero_loss_diagnosis as diagnosis


def messages_of(*entries: tuple[dict[str, float], dict[str, list[float]]], **settings: Any) -> list[str]:
    """Return the messages after each of these log entries of one run."""
    usual = {"fp16": False, "gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    parameter = SimpleNamespace(requires_grad=True)
    embedding = SimpleNamespace(_forward_hooks={}, parameters=lambda: [parameter])
    model = SimpleNamespace(
        named_parameters=lambda: [("weight", parameter)],
        parameters=lambda: [parameter],
        get_input_embeddings=lambda: embedding,
    )
    trainer = SimpleNamespace(args=SimpleNamespace(**{**usual, **settings}), model=model, beta=0.0)
    run = diagnosis._Run()
    return [message for logs, noted in entries if (message := diagnosis._diagnose(trainer, run, logs, noted))]


def entry(loss: float, grad_norm: float | None, *shares: float, deviation: float = 0.5) -> Any:
    logs = {"loss": loss} if grad_norm is None else {"loss": loss, "grad_norm": grad_norm}
    return logs, {"reward_std": [deviation] * len(shares), "frac_reward_zero_std": list(shares)}


def test_no_bug_is_reported_at_the_third_zero_in_a_row() -> None:
    zero, nonzero = entry(0.0, 0.3, 0.0), entry(0.1, 0.3, 0.0)
    assert messages_of(zero, zero, nonzero, zero, zero) == []
    assert messages_of(zero, zero, zero)[0].startswith("no bug: the loss is 0, grad_norm is 0.3")


def test_no_bug_is_not_reported_with_a_kl_term() -> None:
    assert diagnosis._no_bug(3, 0.0, 0.3, beta=0.5, kl=0.2) is None


def test_a_deviation_over_the_batch_is_no_group_signal() -> None:
    assert messages_of(*[entry(0.0, 0.0, 1.0, deviation=0.7)] * 10)[0].startswith("no learning signal")


def test_no_signal_is_not_reported_of_a_loss_that_the_rewards_do_not_explain() -> None:
    # MiniLLM has a loss besides the rewards, which are all equal by default.
    assert messages_of(*[entry(0.0166, 0.74, 1.0, deviation=0.0)] * 20) == []


def test_one_group_with_a_signal_in_ten_is_enough() -> None:
    assert messages_of(*[entry(0.0, 0.0, 1.0)] * 5, entry(0.0, 0.4, 0.5), *[entry(0.0, 0.0, 1.0)] * 20) == []


def test_a_mean_of_ten_generations_counts_as_ten() -> None:
    assert messages_of(entry(0.0, 0.0, *[1.0] * 10))[0].startswith("no learning signal")


def test_no_gradient_is_reported_after_ten_steps_of_signal() -> None:
    assert messages_of(*[entry(0.0, 0.0, 0.5)] * 19) == []
    assert messages_of(*[entry(0.0, 0.0, 0.5)] * 20)[0].startswith("no gradient")


def test_one_earlier_gradient_is_enough() -> None:
    assert messages_of(entry(0.1, 0.2, 0.0), *[entry(0.0, 0.0, 0.0)] * 50) == []


@pytest.mark.parametrize("deepspeed", [True, False])
def test_an_optimizer_without_parameters_proves_nothing_under_deepspeed(deepspeed: bool) -> None:
    trainer = SimpleNamespace(
        args=SimpleNamespace(fp16=False, gradient_checkpointing=False),
        model=SimpleNamespace(named_parameters=list, get_input_embeddings=_no_embedding),
        optimizer=SimpleNamespace(param_groups=[{"params": []}]),
        is_deepspeed_enabled=deepspeed,
        beta=0.0,
    )
    logs, metrics = entry(0.1, 1.08, 0.0)
    assert (diagnosis._diagnose(trainer, diagnosis._Run(), logs, metrics) is None) is deepspeed


def _no_embedding() -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("grad_norm", [None, math.nan, math.inf, -1.0])
def test_without_a_gradient_norm_nothing_is_reported(grad_norm: float | None) -> None:
    assert messages_of(*[entry(0.0, grad_norm, 0.0)] * 50) == []


def test_skipped_steps_under_fp16_are_tolerated() -> None:
    assert messages_of(*[entry(0.0, 0.0, 0.0)] * 39, fp16=True) == []
    assert len(messages_of(*[entry(0.0, 0.0, 0.0)] * 40, fp16=True)) == 1


def test_with_batch_scaling_only_zero_deviation_counts() -> None:
    assert messages_of(*[entry(0.0, 0.0, 0.0)] * 50, scale_rewards="batch") == []
    assert messages_of(*[entry(0.0, 0.0, 1.0, deviation=0.0)] * 10, scale_rewards="batch")[0].startswith(
        "no learning signal"
    )


def test_a_step_without_a_generation_is_ignored() -> None:
    step: Any = ({"loss": 0.0, "grad_norm": 0.0}, {})
    assert messages_of(*[step] * 50) == []


def test_a_lost_or_frozen_adapter_is_described() -> None:
    assert diagnosis._lost(0, 0, merged=False) is None
    assert "8 of its 8 tensors were initialised again" in str(diagnosis._lost(8, 8, merged=False))
    assert "put aside" in str(diagnosis._lost(8, 0, merged=False))
    assert "merged" in str(diagnosis._lost(8, 8, merged=True))
    assert diagnosis._missed(0, []) is None
    assert "the 2 adapter tensors of the LM head" in str(diagnosis._missed(2, []))
    assert "is_trainable=True" in str(diagnosis._not_trainable(29, ["default"]))
    assert diagnosis._not_trainable(29, []) is None
