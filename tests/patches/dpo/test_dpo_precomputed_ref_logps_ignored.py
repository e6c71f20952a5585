"""The loss has the precomputed reference of its batch, where there is one, and computes the reference where not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import dpo_stub, pair_batch, pair_log_probs, pair_loss, pair_micro_batches, tiny_causal_lm

MICRO_BATCHES = list(pair_micro_batches())
PAIRS = MICRO_BATCHES[0].pairs
COLUMNS = ["reference_chosen_logps", "reference_rejected_logps"]


def trainer_of(*, rpo_alpha: float | None = None, **attributes: Any) -> Any:
    defaults = {"model": tiny_causal_lm(), "ref_model": None, "precompute_ref_log_probs": True}
    trainer = dpo_stub(dpo_trainer, state=SimpleNamespace(global_step=0), **{**defaults, **attributes})
    trainer.args.rpo_alpha = rpo_alpha
    return trainer


def batch(*without: str) -> dict[str, Any]:
    return {name: value for name, value in pair_batch(dpo_trainer, PAIRS).items() if name not in without}


def gradient(loss: Any, trainer: Any) -> Any:
    return torch.autograd.grad(loss, trainer.model.weight, retain_graph=True)[0]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_each_micro_batch_has_its_own_reference(training: bool) -> None:
    trainer = trainer_of()
    trainer.model.train(training)
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        rows = pair_batch(dpo_trainer, micro_batch.pairs)
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, rows, train_eval="train" if training else "eval")
        policy = pair_log_probs(trainer.model, micro_batch.pairs)
        chosen, rejected = torch.tensor([pair.reference for pair in micro_batch.pairs]).T
        right = pair_loss(trainer.args.beta, policy, (chosen, rejected))
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(gradient(loss, trainer), gradient(right, trainer))
        rewards = trainer.args.beta * (policy[0] - chosen).mean()
        torch.testing.assert_close(metrics[f"{'' if training else 'eval_'}rewards/chosen"], rewards.detach())


def test_two_trainers_have_it_each() -> None:
    losses = [trainer.get_batch_loss_metrics(trainer.model, batch())[0] for trainer in (trainer_of(), trainer_of())]
    assert losses[0].equal(losses[1])
    assert float(losses[0].detach()) != pytest.approx(math.log(2))


def test_the_reference_is_not_computed() -> None:
    trainer = trainer_of()
    forward, calls = trainer.concatenated_forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(*args, **kwargs)

    trainer.concatenated_forward = counted
    trainer.get_batch_loss_metrics(trainer.model, batch())
    assert len(calls) == 1
    assert trainer.concatenated_forward is counted


def test_a_call_leaves_nothing_on_the_trainer() -> None:
    trainer = trainer_of()
    trainer.get_batch_loss_metrics(trainer.model, batch())
    assert "concatenated_forward" not in vars(trainer)


@pytest.mark.parametrize(
    ("precomputed", "missing"),
    [(False, []), (True, COLUMNS[:1]), (True, COLUMNS[1:]), (True, COLUMNS)],
    ids=["not asked for", "without the chosen", "without the rejected", "without both"],
)
def test_where_nothing_is_precomputed_the_reference_is_computed(precomputed: bool, missing: list[str]) -> None:
    trainer = trainer_of(precompute_ref_log_probs=precomputed)
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch(*missing))
    # Without a ref_model the policy is its own reference.
    assert float(loss.detach()) == pytest.approx(math.log(2))


def test_with_rpo_alpha_the_loss_is_that_of_trl(switch: Any) -> None:
    trainer = trainer_of(rpo_alpha=0.5)
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch())
    with switch.off():
        of_trl, _ = trainer.get_batch_loss_metrics(trainer.model, batch())
    assert loss.equal(of_trl)


def test_trl_computes_the_reference_again(switch: Any) -> None:
    trainer = trainer_of()
    with switch.off():
        loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch())
    assert float(loss.detach()) == pytest.approx(math.log(2))
