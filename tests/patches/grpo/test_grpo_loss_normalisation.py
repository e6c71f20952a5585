"""Loss, gradient, ``kl`` and ``clip_ratio`` are means over sequences, or over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import grpo_trainer

from trl_hotfix.testing import stub_grpo_trainer, tiny_causal_lm

import tiny

ID, TARGET = "grpo-loss-normalisation", "trl.trainer.grpo_trainer:GRPOTrainer.compute_loss"
BETA = 0.1
LOG_RATIO = torch.tensor([[0.2], [0.4], [0.8], [0.6]])
"""The reference differs more from one sequence than from another."""

Lengths = tuple[int, int, int, int]


class Rank:
    """A trainer on one of two ranks, with a model of one matrix. ``masks`` has the mask of each of its calls."""

    def __init__(self, tokens_elsewhere: int = 44, **settings: Any) -> None:
        self.tokens_elsewhere = tokens_elsewhere
        self.model = tiny_causal_lm(SimpleNamespace())
        self.tokens = torch.arange(36).reshape(4, 9) % 11
        self.masks: list[Any] = []
        self.model.register_forward_pre_hook(
            lambda _, args, kwargs: self.masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        self.reference = self.log_probs().detach() + LOG_RATIO
        self.trainer = stub_grpo_trainer(
            grpo_trainer, None, self.reference, **{"beta": BETA, "temperature": 1.0, "num_iterations": 1, **settings}
        )
        ranks = {"num_processes": 2, "reduce": lambda tokens, reduction: tokens + self.tokens_elsewhere}
        vars(self.trainer.accelerator).update(ranks)

    def log_probs(self) -> Any:
        next_tokens = torch.log_softmax(self.model.weight[self.tokens[:, :-1]], dim=-1)
        return next_tokens.gather(-1, self.tokens[:, 1:, None])[..., 0]

    def batch(self, lengths: Lengths) -> dict[str, Any]:
        return {
            "prompt_ids": self.tokens[:, :1],
            "prompt_mask": torch.ones(4, 1, dtype=torch.long),
            "completion_ids": self.tokens[:, 1:],
            "completion_mask": (torch.arange(8) < torch.tensor(lengths)[:, None]).long(),
            "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
            "old_per_token_logps": None,
            "ref_per_token_logps": self.reference,
        }

    def loss(self, batch: dict[str, Any], step: int = 0, *, training: bool = True) -> Any:
        """Return the loss of a micro-batch by TRL's method."""
        self.trainer.state.global_step = step
        self.trainer.model.training, self.trainer.control.should_evaluate = training, not training
        return self.trainer.compute_loss(self.model, batch)

    def metric(self, name: str, *, training: bool = True) -> float:
        return float(self.trainer._metrics["train" if training else "eval"][name][-1])

    def mean(self, kind: str, values: Any, lengths: Lengths) -> Any:
        """Return the mean of values over the sequences, over the tokens of this rank, or over those of both."""
        mask = torch.arange(8) < torch.tensor(lengths)[:, None]
        counts = mask.sum(1).clamp(min=1)
        if kind == "sequence":
            return ((values * mask).sum(1) / counts).sum() / mask.any(1).sum()
        total, tokens = (values * mask).sum(), mask.sum()
        return total / tokens if kind == "trl" else 2 * total / (tokens + self.tokens_elsewhere)

    def assert_is(self, kind: str, lengths: Lengths, step: int = 0, *, training: bool = True) -> None:
        """Compare loss, gradient and ``kl`` of a micro-batch with the formula (arXiv:2402.03300, equations 3 and 4)."""
        loss = self.loss(batch := self.batch(lengths), step, training=training)
        log_probs = self.log_probs()
        log_ratio = self.reference - log_probs
        kl = torch.exp(log_ratio) - log_ratio - 1
        # The ratio of the probabilities is 1, and only its derivative counts.
        ratio = torch.exp(log_probs - log_probs.detach())
        expected = self.mean(kind, BETA * kl - ratio * batch["advantages"][:, None], lengths)
        torch.testing.assert_close(loss, expected)
        gradients = (torch.autograd.grad(value, self.model.weight)[0] for value in (loss, expected))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
        of_metric = float(self.mean(kind, kl.detach(), lengths))
        assert self.metric("kl", training=training) == pytest.approx(of_metric, rel=1e-5)

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)


@pytest.fixture(params=["sequence", "global"])
def kind(request: pytest.FixtureRequest, switch: Any) -> Iterator[str]:
    """Return the option that is on."""
    with switch.on(normalisation=request.param):
        yield request.param


MICRO_BATCHES: list[tuple[int, bool, Lengths, int]] = [
    (0, True, (2, 4, 8, 6), 44),
    (0, False, (2, 4, 8, 6), 44),
    (0, True, (7, 3, 1, 5), 9),
    (1, True, (2, 4, 8, 6), 10),
    (1, False, (8, 1, 1, 1), 3),
]


def test_each_micro_batch_has_the_loss_the_gradient_and_the_kl_of_the_formula(kind: str) -> None:
    rank = Rank()
    for step, training, lengths, rank.tokens_elsewhere in MICRO_BATCHES:
        rank.assert_is(kind, lengths, step, training=training)
    assert rank.acts == len(MICRO_BATCHES)


def test_trl_has_the_mean_over_the_tokens_of_a_rank(switch: Any) -> None:
    with switch.off():
        rank = Rank()
        for step, training, lengths, rank.tokens_elsewhere in MICRO_BATCHES:
            rank.assert_is("trl", lengths, step, training=training)


def test_without_an_option_it_is_the_mean_over_sequences() -> None:
    Rank().assert_is("sequence", (2, 4, 8, 6))


def test_each_trainer_has_the_loss_of_its_own_batch(kind: str) -> None:
    first, second = Rank(44), Rank(3)
    for lengths in ((2, 4, 8, 6), (7, 3, 1, 5)):
        first.assert_is(kind, lengths)
        second.assert_is(kind, lengths[::-1])


@pytest.mark.parametrize("lengths", [(2, 4, 8, 6), (7, 3, 1, 5)])
def test_the_clip_ratio_is_the_same_mean(kind: str, lengths: Lengths) -> None:
    rank = Rank(num_iterations=2)
    batch = rank.batch(lengths)
    # The policy has moved up in every third token, and down in the others. TRL counts what moves against its advantage.
    moved = torch.where(torch.arange(32).reshape(4, 8) % 3 == 0, 0.5, -0.5)
    batch["old_per_token_logps"] = rank.log_probs().detach() - moved
    rank.loss(batch)
    is_clipped = ((moved > 0) != (batch["advantages"][:, None] > 0)).float()
    assert rank.metric("clip_ratio") == pytest.approx(float(rank.mean(kind, is_clipped, lengths)))


def test_without_a_reference_the_loss_is_the_same_mean(kind: str) -> None:
    rank, lengths = Rank(beta=0.0), (2, 4, 8, 6)
    loss = rank.loss(batch := rank.batch(lengths))
    expected = rank.mean(kind, -batch["advantages"][:, None].expand(4, 8), lengths)
    torch.testing.assert_close(loss.detach(), expected)


def test_equally_long_sequences_have_the_loss_of_trl(switch: Any) -> None:
    rank, lengths = Rank(), (5, 5, 5, 5)
    rank.assert_is("sequence", lengths)
    with switch.off():
        rank.assert_is("trl", lengths)


def test_ranks_with_equally_many_tokens_have_the_loss_of_trl(switch: Any) -> None:
    with switch.on(normalisation="global"):
        Rank(20).assert_is("trl", (2, 4, 8, 6))


def test_a_sequence_without_tokens_is_left_out(kind: str) -> None:
    Rank().assert_is(kind, (2, 0, 8, 6))


def test_the_model_has_the_mask_of_the_batch(kind: str) -> None:
    rank = Rank()
    batch = rank.batch((7, 3, 1, 5))
    rank.loss(batch)
    expected = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    (mask,) = rank.masks
    assert mask.dtype == expected.dtype
    assert mask.equal(expected)


def test_the_batch_stays_as_it_is_since_the_trainer_uses_it_again(kind: str) -> None:
    rank = Rank()
    batch = rank.batch((7, 3, 1, 5))
    before = dict(batch)
    mask = batch["completion_mask"].clone()
    assert rank.loss(batch).equal(rank.loss(batch))
    assert batch.keys() == before.keys()
    assert all(batch[name] is value for name, value in before.items())
    assert batch["completion_mask"].equal(mask)


def test_the_trainer_has_its_own_methods_afterwards(kind: str) -> None:
    rank = Rank()
    own = vars(rank.trainer).copy(), vars(rank.trainer.accelerator).copy()
    rank.loss(rank.batch((2, 4, 8, 6)))
    assert (vars(rank.trainer), vars(rank.trainer.accelerator)) == own


def test_the_trainer_has_its_own_methods_after_an_error(kind: str) -> None:
    rank = Rank()
    own = vars(rank.trainer).copy(), vars(rank.trainer.accelerator).copy()
    batch = rank.batch((2, 4, 8, 6))
    del batch["advantages"]
    with pytest.raises(KeyError, match="advantages"):
        rank.loss(batch)
    assert (vars(rank.trainer), vars(rank.trainer.accelerator)) == own
