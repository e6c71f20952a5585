"""``policy_loss`` is the loss of the step for losses over its tokens, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import stub_grpo_trainer

OVER_THE_STEP = ["dapo", "cispo", "vespo"]


def trainer_of(loss_type: str, accumulation: int, *, training: bool = True, coefficient: float = 0.5) -> Any:
    log_probs = torch.full((1, 2), -1.0)
    trainer = stub_grpo_trainer(
        grpo_trainer,
        log_probs,
        training=training,
        loss_type=loss_type,
        beta=0.0,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
    )
    trainer._entropy_bonus_enabled, trainer.entropy_coef = coefficient != 0, coefficient
    trainer.use_adaptive_entropy = False
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda value: value, sync_gradients=False, reduce=lambda value, *args, **kwargs: value
    )
    return trainer


def computed(trainer: Any, number: int = 1) -> list[float]:
    """Compute the loss of so many micro-batches of two tokens, and return the losses."""
    tokens = {
        f"{part}_{what}": torch.ones(1, 2).long() for part in ("prompt", "completion") for what in ("ids", "mask")
    }
    items = torch.tensor(2 * trainer.current_gradient_accumulation_steps)
    inputs = {**tokens, "advantages": torch.ones(1), "num_items_in_batch": items, "old_per_token_logps": None}
    return [float(trainer._compute_loss(None, dict(inputs))) for _ in range(number)]


def metrics(trainer: Any) -> dict[str, dict[str, list[float]]]:
    return {mode: {name: list(values) for name, values in trainer._metrics[mode].items()} for mode in ("train", "eval")}


@pytest.mark.parametrize("loss_type", OVER_THE_STEP)
@pytest.mark.parametrize("accumulation", [2, 4])
def test_its_mean_over_the_micro_batches_is_the_loss_of_the_step(
    loss_type: str, accumulation: int, switch: Any
) -> None:
    trainer, as_it_is = trainer_of(loss_type, accumulation), trainer_of(loss_type, accumulation)
    losses = computed(trainer, accumulation)
    with switch.off():
        assert computed(as_it_is, accumulation) == losses
    wrong = as_it_is._metrics["train"]["policy_loss"]
    logged = trainer._metrics["train"]["policy_loss"]
    assert logged == pytest.approx([accumulation * value for value in wrong])
    assert sum(logged) / accumulation == pytest.approx(sum(wrong))
    # No other metric changes.
    assert {**metrics(trainer)["train"], "policy_loss": wrong} == metrics(as_it_is)["train"]


@pytest.mark.parametrize(
    ("loss_type", "accumulation", "fields"),
    [
        *[(loss_type, 1, {}) for loss_type in OVER_THE_STEP],
        *[(loss_type, 2, {}) for loss_type in ("grpo", "bnpo", "dr_grpo")],
        *[(loss_type, 2, {"training": False}) for loss_type in OVER_THE_STEP],
        ("dapo", 2, {"coefficient": 0.0}),
    ],
)
def test_what_is_right_stays(loss_type: str, accumulation: int, fields: dict[str, Any], switch: Any) -> None:
    trainer, as_it_is = trainer_of(loss_type, accumulation, **fields), trainer_of(loss_type, accumulation, **fields)
    losses = computed(trainer, 2)
    with switch.off():
        assert computed(as_it_is, 2) == losses
    assert metrics(trainer) == metrics(as_it_is)
