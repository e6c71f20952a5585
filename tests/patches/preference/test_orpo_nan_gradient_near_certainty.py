"""The gradients of ORPO are finite near certainty, and those of the formula. Other log-probs have what TRL computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

BETA = 0.5
LARGEST = -(2.0**-22)
"""The largest log-prob that TRL's method is given."""

CHOSEN = [-1e-8, -0.1, -0.5, LARGEST / 2, -2.0]
REJECTED = [-0.1, -1e-8, -1.0, -2.0, LARGEST / 2]
"""A sure chosen completion, a sure rejected one, two usual ones, and log-probs between the border and 0."""

ODDS = {math.log(odds / (1 + odds)): odds for odds in (1, 2, 3)}
"""Log-probs, and their odds. Up to 0.11.4 TRL rounds the gradient near certainty to multiples of beta / 4."""

ONE, TWO, THREE = ODDS

HALVES = [torch.bfloat16, torch.float16]


def trainer_of(beta: float = BETA) -> Any:
    trainer_class, config_class = tiny.classes("ORPO")
    return stub_trainer(trainer_class, default_arguments(config_class), beta=beta)


def losses_and_gradients(chosen: list[float], rejected: list[float], dtype: Any = torch.float32) -> list[Any]:
    """Return the losses, and their gradients by the log-probs of the chosen and of the rejected completions."""
    leaves = [torch.tensor(logps, dtype=dtype, requires_grad=True) for logps in (chosen, rejected)]
    losses = trainer_of().odds_ratio_loss(*leaves)[0]
    return [losses.detach(), *torch.autograd.grad(losses.sum(), leaves)]


def shifted(logps: list[float]) -> list[float]:
    return [min(logp, LARGEST) for logp in logps]


def is_equal(one: list[Any], other: list[Any]) -> bool:
    return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sure_completions_have_the_losses_and_gradients_of_the_border(dtype: Any, switch: Any) -> None:
    found = losses_and_gradients(CHOSEN, REJECTED, dtype)
    with switch.off():
        expected = losses_and_gradients(shifted(CHOSEN), shifted(REJECTED), dtype)
    for value, other in zip(found, expected, strict=True):
        assert value.isfinite().all()
        torch.testing.assert_close(value, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_each_row_of_a_batch_may_be_the_sure_one(row: int) -> None:
    chosen, rejected = [-0.3, -0.7, -1.1], [ONE, TWO, THREE]
    chosen[row] = -1e-9
    _, gradient, _ = losses_and_gradients(chosen, rejected)
    # As the log-prob goes to 0, its gradient goes to beta times the odds of the other completion.
    assert float(gradient[row]) == pytest.approx(BETA * ODDS[rejected[row]], rel=1e-3)
    assert gradient.isfinite().all()


def test_trl_has_no_gradient_for_a_sure_completion(switch: Any) -> None:
    with switch.off():
        losses, gradient, _ = losses_and_gradients(CHOSEN, REJECTED)
    assert losses[0].isfinite()
    assert gradient[0].isnan()


def test_a_probability_of_one_has_a_gradient_too() -> None:
    losses, of_chosen, of_rejected = losses_and_gradients([0.0, -0.5], [TWO, 0.0])
    assert float(of_chosen[0]) == pytest.approx(BETA * 2, rel=1e-3)
    assert all(value.isfinite().all() for value in (losses, of_chosen, of_rejected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
def test_usual_log_probs_have_what_trl_computes(dtype: Any, switch: Any) -> None:
    batch = [-0.5, -1.0, -0.1], [-1.0, -0.25, -3.0]
    patched = losses_and_gradients(*batch, dtype)
    with switch.off():
        assert is_equal(patched, losses_and_gradients(*batch, dtype))


def test_a_log_prob_at_the_border_has_what_trl_computes(switch: Any) -> None:
    patched = losses_and_gradients([LARGEST, -0.5], [-1.0, LARGEST])
    with switch.off():
        assert is_equal(patched, losses_and_gradients([LARGEST, -0.5], [-1.0, LARGEST]))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_has_the_gradient_of_the_formula(dtype: Any) -> None:
    losses, gradient, _ = losses_and_gradients([0.0, -0.5], [-0.5, -1.0], dtype)
    assert losses.dtype is torch.float32
    assert gradient.dtype is dtype
    assert float(gradient[0]) == pytest.approx(BETA * 1.5415, abs=BETA / 4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("row", [0, 1])
def test_half_precision_is_computed_in_float32_within_two_units_of_one(dtype: Any, side: str, row: int) -> None:
    eps = torch.finfo(dtype).eps
    nearer = -2 * eps * (1 - eps / 2)  # the next number
    batch = {"chosen": [-0.5, -1.0], "rejected": [-1.0, -0.5]}
    batch[side][row] = nearer
    losses, *gradients = losses_and_gradients(**batch, dtype=dtype)
    assert losses.dtype is torch.float32
    assert all(gradient.dtype is dtype and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_half_precision_farther_away_has_what_trl_computes(dtype: Any, side: str, switch: Any) -> None:
    batch = {"chosen": [-0.5, -1.0], "rejected": [-1.0, -0.5]}
    batch[side][0] = -2 * torch.finfo(dtype).eps
    patched = losses_and_gradients(**batch, dtype=dtype)
    with switch.off():
        assert is_equal(patched, losses_and_gradients(**batch, dtype=dtype))


def test_both_sides_are_in_float32_if_one_is_in_half_precision() -> None:
    chosen = torch.tensor([-1e-8], requires_grad=True)
    rejected = torch.tensor([-0.5], dtype=torch.bfloat16, requires_grad=True)
    losses = trainer_of().odds_ratio_loss(chosen, rejected)[0]
    gradients = torch.autograd.grad(losses.sum(), (chosen, rejected))
    assert losses.dtype is torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_the_arguments_may_be_passed_by_name_and_without_gradients() -> None:
    logps = {"policy_chosen_logps": torch.tensor(CHOSEN), "policy_rejected_logps": torch.tensor(REJECTED)}
    with torch.no_grad():
        losses, chosen_rewards, rejected_rewards, *_ = trainer_of().odds_ratio_loss(**logps)
    torch.testing.assert_close(losses, losses_and_gradients(CHOSEN, REJECTED)[0])
    torch.testing.assert_close(chosen_rewards, BETA * torch.tensor(shifted(CHOSEN)), rtol=1e-6, atol=0)
    torch.testing.assert_close(rejected_rewards, BETA * torch.tensor(shifted(REJECTED)), rtol=1e-6, atol=0)


def test_the_log_probs_that_are_given_stay_as_they_are() -> None:
    chosen, rejected = torch.tensor(CHOSEN), torch.tensor(REJECTED)
    trainer_of().odds_ratio_loss(chosen, rejected)
    assert chosen.equal(torch.tensor(CHOSEN))
    assert rejected.equal(torch.tensor(REJECTED))


def test_every_trainer_has_finite_gradients_in_every_step() -> None:
    for beta in (0.5, 0.25):
        trainer = trainer_of(beta)
        for rejected, odds in ODDS.items():
            chosen = torch.tensor([-1e-8], requires_grad=True)
            losses = trainer.odds_ratio_loss(chosen, torch.tensor([rejected]))[0]
            (gradient,) = torch.autograd.grad(losses.sum(), chosen)
            assert float(gradient) == pytest.approx(beta * odds, rel=1e-3)
