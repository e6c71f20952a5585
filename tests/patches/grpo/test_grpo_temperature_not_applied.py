"""The log-probs of policy and reference are those of the temperature that the completions were drawn at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import scored_completions, stub_with_reference, tiny_causal_lm, token_losses_of_a_group

import tiny

ID = "grpo-temperature-not-applied"
BETA, REWARDS = 0.3, (1.0, 4.0, 2.0, 0.0)
LENGTHS = (3, 1, 2, 3)
"""Tokens of the completions, with the end of sequence that the shorter ones have."""

Row = tuple[int, int, int]

GENERATES_IN_THE_LOSS = not hasattr(grpo_trainer.GRPOTrainer, "_get_per_token_logps")
"""Whether it is 0.14.0, where the patch is on another method."""

METHOD = "compute_loss" if GENERATES_IN_THE_LOSS else "_get_per_token_logps"
TARGET = f"trl.trainer.grpo_trainer:GRPOTrainer.{METHOD}"


class Case:
    """A trainer on four completions of one prompt. With an adapter the model is wrapped, and is its own reference."""

    def __init__(self, temperature: float | None, *, has_adapter: bool = False) -> None:
        self.policy, self.reference = model_of(0.0), model_of(1.0)
        self.trainer = stub_with_reference(
            grpo_trainer,
            self.policy,
            self.reference,
            self._generate,
            REWARDS,
            has_adapter=has_adapter,
            temperature=temperature,
            beta=BETA,
        )
        self.temperature = 1.0 if temperature is None else temperature

    def _generate(self, input_ids: Any, **kwargs: Any) -> Any:
        # The model calls itself here, and samples from its own logits: the temperature is applied later.
        assert self.policy(input_ids).logits.equal(self.policy.weight[input_ids])
        return self.tokens

    def loss(self, first_row: Row, step: int = 0, *, training: bool = True) -> Any:
        """Return the loss of a micro-batch, whose completions follow from the first one."""
        rows = [[2 + (token + 3 * row) % 14 for token in first_row] for row in range(4)]
        for row, length in zip(rows, LENGTHS, strict=True):
            if length < 3:
                row[length - 1 :] = [1, *[0] * (3 - length)]
        self.tokens = torch.cat([torch.tensor([[3, 4]]).expand(4, 2), torch.tensor(rows)], dim=1)
        self.trainer.state.global_step, self.trainer.control.should_evaluate = step, not training
        self.trainer.model.train(training)
        inputs = [{"prompt": "a"}] if GENERATES_IN_THE_LOSS else scored_completions(self.trainer)
        return self.trainer.compute_loss(self.trainer.model, inputs)

    def log_probs(self, temperature: float) -> list[Any]:
        """Return those of policy and reference."""
        found = []
        for model in (self.policy, self.reference):
            distribution = (model.weight[self.tokens[:, 1:-1]] / temperature).log_softmax(-1)
            found.append(distribution.gather(-1, self.tokens[:, 2:, None])[..., 0])
        return found

    def mean(self, values: Any) -> Any:
        """Return the mean over sequences of the mean over the tokens of each."""
        mask = torch.arange(3) < torch.tensor(LENGTHS)[:, None]
        return ((values * mask).sum(1) / mask.sum(1)).mean()

    def assert_is_of(self, temperature: float, loss: Any) -> None:
        """Compare the loss, its gradient and ``kl`` with those of the formula at a temperature."""
        policy, reference = self.log_probs(temperature)
        expected = self.mean(token_losses_of_a_group(policy, reference, torch.tensor(REWARDS), BETA))
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(value, self.policy.weight, retain_graph=True)[0] for value in (loss, expected))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        kl = torch.exp(reference - policy) - (reference - policy) - 1
        assert self.trainer._metrics["kl"][-1] == pytest.approx(float(self.mean(kl)), rel=1e-5)

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)


def model_of(phase: float) -> Any:
    """Return a model of one matrix. It knows ``num_logits_to_keep``, and not ``logits_to_keep``."""
    model = tiny_causal_lm(vocabulary=16)
    model.weight.data = torch.sin(torch.arange(256.0) + phase).view(16, 16)

    def keep(model: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        outputs.logits = outputs.logits[:, -kwargs.get("num_logits_to_keep", 0) :]

    model.register_forward_hook(keep, with_kwargs=True)
    return model


MICRO_BATCHES: list[tuple[Row, int, bool]] = [
    ((5, 9, 2), 0, True),
    ((7, 3, 8), 0, True),
    ((5, 9, 2), 1, True),
    ((6, 4, 11), 1, False),
]

each_temperature = pytest.mark.parametrize("temperature", [0.5, 0.9, 2.0])
each_reference = pytest.mark.parametrize("has_adapter", [False, True], ids=["reference model", "adapter"])


@each_temperature
@each_reference
def test_each_micro_batch_has_the_loss_of_the_temperature(temperature: float, has_adapter: bool) -> None:
    case = Case(temperature, has_adapter=has_adapter)
    for row, step, training in MICRO_BATCHES:
        case.assert_is_of(temperature, case.loss(row, step, training=training))
    # From 0.15.0 on the log-probs of policy and reference are calls of their own.
    assert case.acts == len(MICRO_BATCHES) * (1 if GENERATES_IN_THE_LOSS else 2)


@each_reference
def test_trl_has_the_loss_of_temperature_1(has_adapter: bool, switch: Any) -> None:
    case = Case(0.5, has_adapter=has_adapter)
    with switch.off():
        for row, step, training in MICRO_BATCHES:
            case.assert_is_of(1.0, case.loss(row, step, training=training))


def test_each_trainer_has_its_own_temperature() -> None:
    cases = [Case(0.5), Case(2.0), Case(0.9, has_adapter=True)]
    for row, step, training in MICRO_BATCHES:
        for case in cases:
            case.assert_is_of(case.temperature, case.loss(row, step, training=training))


@each_reference
@pytest.mark.parametrize("temperature", [None, 0.0, 1, 1.0])
def test_at_a_temperature_that_changes_nothing_or_has_no_log_probs_the_loss_is_trls(
    temperature: float | None, has_adapter: bool, switch: Any
) -> None:
    case = Case(temperature, has_adapter=has_adapter)
    losses = [case.loss(row, step, training=training) for row, step, training in MICRO_BATCHES]
    assert case.acts == 0
    with switch.off():
        for loss, (row, step, training) in zip(losses, MICRO_BATCHES, strict=True):
            assert loss.equal(case.loss(row, step, training=training))
            case.assert_is_of(1.0, loss)


@each_reference
def test_the_trainer_has_its_own_models_afterwards(has_adapter: bool) -> None:
    case = Case(0.5, has_adapter=has_adapter)
    model, reference = case.trainer.model, case.trainer.ref_model
    case.loss((5, 9, 2))
    # A view is equal to what it is a view of.
    assert case.trainer.model is model
    assert case.trainer.ref_model is reference


def test_the_trainer_has_its_own_reference_after_an_error() -> None:
    case = Case(0.5)
    del case.reference.weight
    with pytest.raises(AttributeError, match="weight"):
        case.loss((5, 9, 2))
    assert case.trainer.ref_model is case.reference


def test_the_logits_of_the_models_themselves_stay_as_they_are() -> None:
    case = Case(0.5)
    case.loss((5, 9, 2))
    for model in (case.policy, case.reference):
        assert model(case.tokens).logits.equal(model.weight[case.tokens])


def test_logits_that_are_not_needed_are_dropped_before_the_division() -> None:
    case, returned = Case(0.5), []
    # The outputs are kept, and their logits are replaced by divided ones.
    case.policy.register_forward_hook(lambda model, args, outputs: returned.append(outputs))
    case.loss((5, 9, 2))
    assert returned[-1].logits.size(1) == 4
