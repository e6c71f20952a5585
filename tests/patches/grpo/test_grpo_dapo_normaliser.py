"""The losses that are divided by a token count are divided by that of one optimizer step, in training alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import stub_grpo_trainer

import tiny

ID, TARGET = "grpo-dapo-normaliser", "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
TOKENS = 80
"""Of a generation of four micro-batches."""

LENGTHS, ADVANTAGES = [[2, 4, 8, 6], [5, 1, 3, 7]], [[1.0, -1.0, 0.5, -0.5], [-0.5, 0.25, 1.0, -1.0]]
"""Of two micro-batches."""


def trainer_of(kind: str, accumulated: int) -> Any:
    """Return a trainer whose generations have four micro-batches, and whose steps have ``accumulated`` of these."""
    log_probs = torch.full((4, 8), -0.5, requires_grad=True)
    trainer = stub_grpo_trainer(grpo_trainer, log_probs, loss_type=kind, beta=0.0, steps_per_generation=4)
    trainer.current_gradient_accumulation_steps, trainer.log_probs = accumulated, log_probs
    return trainer


def micro_batch(number: int) -> dict[str, Any]:
    mask = (torch.arange(8) < torch.tensor(LENGTHS[number]).unsqueeze(1)).long()
    return {
        "prompt_ids": torch.ones(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES[number]),
        "old_per_token_logps": None,
        "num_items_in_batch": torch.tensor(TOKENS),
    }


def loss_and_gradient(trainer: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, trainer.log_probs)[0]


def acts(trainer: Any) -> int | None:
    return tiny.acts(ID, TARGET, trainer)


@pytest.fixture(params=["dapo", "cispo", "vespo"])
def kind(request: pytest.FixtureRequest) -> Any:
    try:
        trainer_of(request.param, 4)._compute_loss(None, micro_batch(0))
    except ValueError as error:
        if "Unknown loss type" not in str(error):
            raise
        pytest.skip("this release has no such loss")
    return request.param


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_part_of_a_generation_is_divided_by_its_share_of_the_tokens(kind: str, accumulated: int, number: int) -> None:
    trainer = trainer_of(kind, accumulated)
    # A later step uses the same inputs again if num_iterations > 1.
    inputs = micro_batch(number)
    for step in range(2):
        trainer.state.global_step = step
        found = loss_and_gradient(trainer, inputs)
        of_four = loss_and_gradient(trainer_of(kind, 4), micro_batch(number))
        for value, whole in zip(found, of_four, strict=True):
            torch.testing.assert_close(value, whole * 4 / accumulated)
    assert inputs["num_items_in_batch"] == TOKENS
    assert acts(trainer) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_dapo_is_the_sum_of_the_token_losses_over_their_count(number: int) -> None:
    # The ratio of the probabilities is 1.
    total = -sum(map(float.__mul__, ADVANTAGES[number], map(float, LENGTHS[number])))
    loss, _ = loss_and_gradient(trainer_of("dapo", 2), micro_batch(number))
    assert float(loss) == pytest.approx(total / (TOKENS / 2))


def test_a_step_that_sees_the_whole_generation_has_trls_loss(kind: str, switch: Any) -> None:
    trainer = trainer_of(kind, 4)
    patched = loss_and_gradient(trainer, micro_batch(0))
    assert acts(trainer) == 0
    with switch.off():
        unpatched = loss_and_gradient(trainer_of(kind, 4), micro_batch(0))
    assert all(map(torch.equal, patched, unpatched))


def test_an_evaluation_has_trls_loss(kind: str, switch: Any) -> None:
    trainer = trainer_of(kind, 2)
    trainer.model.training = False
    patched = loss_and_gradient(trainer, micro_batch(1))
    assert acts(trainer) == 0
    with switch.off():
        unpatched = loss_and_gradient(trainer, micro_batch(1))
    assert all(map(torch.equal, patched, unpatched))


@pytest.mark.parametrize("other", ["grpo", "bnpo", "dr_grpo"])
def test_another_loss_needs_no_count(other: str) -> None:
    trainer, inputs = trainer_of(other, 2), micro_batch(0)
    del inputs["num_items_in_batch"]
    loss_and_gradient(trainer, inputs)
    assert acts(trainer) == 0
