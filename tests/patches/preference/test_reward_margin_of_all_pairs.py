"""Each pair has its own margin, in training and evaluation, whatever the size of the micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import reward_trainer

CHOSEN, REJECTED, MARGINS = [1.0, 3.0, -1.0], [0.5, 0.0, 2.0], [0.0, 2.0, 1.0]


def inputs_of(pairs: range = range(3), margins: Any = None) -> dict[str, Any]:
    """Return a micro-batch whose tokens are numbers of rewards. The chosen ones come first."""
    sides = {
        "chosen": torch.tensor([[pair] for pair in pairs]),
        "rejected": torch.tensor([[3 + pair] for pair in pairs]),
    }
    inputs = {f"input_ids_{side}": ids for side, ids in sides.items()}
    inputs |= {f"attention_mask_{side}": torch.ones_like(ids) for side, ids in sides.items()}
    return inputs if margins is None else {**inputs, "margin": margins}


def margins_of(pairs: range = range(3)) -> Any:
    return torch.tensor([MARGINS[pair] for pair in pairs])


def losses(inputs: dict[str, Any], *, outputs: bool = False, **settings: Any) -> tuple[Any, Any, Any]:
    """Return what the real method returns, and the gradients of chosen and rejected rewards."""
    rewards = torch.tensor([*CHOSEN, *REJECTED], requires_grad=True)
    trainer = object.__new__(reward_trainer.RewardTrainer)
    trainer.args = SimpleNamespace(**{"center_rewards_coefficient": None, **settings})
    trainer.use_reward_data_collator = True

    def model(input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        return {"logits": rewards[input_ids]}

    result = trainer.compute_loss(model, inputs, return_outputs=outputs)
    loss = result[0] if outputs else result
    (gradient,) = torch.autograd.grad(loss, rewards)
    return loss, gradient, result


def formula(pairs: range = range(3)) -> tuple[Any, Any]:
    rewards = torch.tensor([*CHOSEN, *REJECTED], requires_grad=True)
    chosen, rejected = rewards[list(pairs)], rewards[[3 + pair for pair in pairs]]
    loss = torch.nn.functional.softplus(-(chosen - rejected - margins_of(pairs))).mean()
    return loss, torch.autograd.grad(loss, rewards)[0]


@pytest.mark.parametrize("pairs", [range(1), range(2), range(1, 3), range(3)], ids=str)
def test_loss_and_gradient_are_those_of_each_pair_alone(pairs: range) -> None:
    loss, gradient, _ = losses(inputs_of(pairs, margins_of(pairs)))
    expected, expected_gradient = formula(pairs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_an_evaluation_has_the_loss_and_the_rewards() -> None:
    loss, _, (_, outputs) = losses(inputs_of(margins=margins_of()), outputs=True)
    torch.testing.assert_close(loss, formula()[0])
    assert outputs["rewards_chosen"].shape == outputs["rewards_rejected"].shape == (3, 1)


def test_the_batch_is_left_as_it_is() -> None:
    inputs = inputs_of(margins=margins_of())
    losses(inputs)
    assert inputs["margin"].shape == (3,)


def test_margins_of_the_shape_of_rewards_stay(switch: Any) -> None:
    inputs = inputs_of(margins=margins_of()[:, None])
    loss, gradient, _ = losses(inputs)
    with switch.off():
        unpatched = losses(inputs)
    assert loss.equal(unpatched[0])
    assert gradient.equal(unpatched[1])
    torch.testing.assert_close(loss, formula()[0])


@pytest.mark.parametrize("coefficient", [None, 0.1])
def test_pairs_without_margins_have_the_loss_of_trl(switch: Any, coefficient: float | None) -> None:
    loss, gradient, _ = losses(inputs_of(), center_rewards_coefficient=coefficient)
    with switch.off():
        unpatched = losses(inputs_of(), center_rewards_coefficient=coefficient)
    assert loss.equal(unpatched[0])
    assert gradient.equal(unpatched[1])
