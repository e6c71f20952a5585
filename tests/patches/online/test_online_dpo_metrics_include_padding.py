"""The metrics of each micro-batch are those of the tokens, and the loss and its gradient stay as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from trl_hotfix.testing import online_dpo_stub

try:
    from trl.experimental.online_dpo import online_dpo_trainer
except ImportError:
    from trl.trainer import online_dpo_trainer

BETA = 0.1


class Completions(NamedTuple):
    """The first half of the rows has the better completions."""

    tokens: list[list[int]]
    mask: list[list[int]]


ONE_PAIR = Completions([[1, 2, 0], [5, 0, 9]], [[1, 1, 1], [1, 1, 0]])
TWO_PAIRS = Completions(
    [[4, 0, 9, 9], [3, 3, 6, 0], [2, 7, 0, 9], [6, 5, 1, 4]], [[1, 1, 0, 0], [1] * 4, [1, 1, 1, 0], [1] * 4]
)
NO_PADDING = Completions(TWO_PAIRS.tokens, [[1] * 4] * 4)
each = pytest.mark.parametrize("pairs", [ONE_PAIR, TWO_PAIRS, NO_PADDING], ids=["one", "two", "no padding"])


def stub(pairs: Completions) -> Any:
    return online_dpo_stub(online_dpo_trainer, torch.tensor(pairs.tokens), torch.tensor(pairs.mask))


def step(trainer: Any, pairs: Completions) -> Any:
    """Compute a micro-batch, and return its loss."""
    trainer.training_step(trainer.model, {"prompt": ["a"] * (len(pairs.tokens) // 2)}, None)
    return trainer.went_backward[-1]


def log_probs(trainer: Any, pairs: Completions) -> tuple[Any, Any]:
    """Return the log-probs of all positions, of the policy and of the reference."""
    tokens = torch.tensor(pairs.tokens)
    # The last token of the prompt is 8.
    previous_tokens = torch.cat([torch.full((len(tokens), 1), 8), tokens[:, :-1]], dim=1)
    policy, reference = (
        model.weight[previous_tokens].log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        for model in (trainer.model, trainer.ref_model)
    )
    return policy, reference.detach()


@each
def test_each_micro_batch_logs_the_metrics_of_the_tokens(pairs: Completions) -> None:
    trainer = stub(pairs)
    for number in (0, 0, 1):
        trainer.state.global_step = number
        step(trainer, pairs)
    policy, reference = log_probs(trainer, pairs)
    mask = torch.tensor(pairs.mask)
    kl = float(((policy - reference) * mask).sum(1).mean())
    logged = trainer.stats
    assert logged["objective/kl"] == [pytest.approx(kl, abs=1e-5)] * 3
    assert logged["objective/entropy"] == [pytest.approx(-float((policy * mask).sum(1).mean()), abs=1e-5)] * 3
    assert logged["objective/non_score_reward"] == [pytest.approx(-BETA * kl, abs=1e-5)] * 3


@each
def test_the_loss_and_its_gradient_are_those_of_the_tokens(pairs: Completions) -> None:
    trainer = stub(pairs)
    policy, reference = log_probs(trainer, pairs)
    margins = ((policy - reference) * torch.tensor(pairs.mask)).sum(1)
    chosen, rejected = margins.chunk(2)
    expected = -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()
    loss = step(trainer, pairs)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(gradients(trainer, loss), gradients(trainer, expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def gradients(trainer: Any, loss: Any) -> Any:
    return torch.autograd.grad(loss, [trainer.model.weight])


def test_the_loss_and_its_gradient_are_bit_by_bit_those_of_trl(switch: Any) -> None:
    patched, unpatched = stub(TWO_PAIRS), stub(TWO_PAIRS)
    loss = step(patched, TWO_PAIRS)
    with switch.off():
        own = step(unpatched, TWO_PAIRS)
    assert loss.equal(own)
    assert gradients(patched, loss)[0].equal(gradients(unpatched, own)[0])


def test_without_padding_the_metrics_are_trls(switch: Any) -> None:
    patched, unpatched = stub(NO_PADDING), stub(NO_PADDING)
    step(patched, NO_PADDING)
    with switch.off():
        step(unpatched, NO_PADDING)
    assert "objective/kl" in unpatched.stats
    assert patched.stats == unpatched.stats
