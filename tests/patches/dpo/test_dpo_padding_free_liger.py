"""Liger is given a row for each sequence, the chosen before the rejected, whatever padding_free is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import (
    Pair,
    dpo_stub,
    pair_batch,
    pair_log_probs,
    pair_micro_batches,
    tiny_causal_lm,
)

pytestmark = pytest.mark.usefixtures("messages")

MICRO_BATCHES = tuple(pair_micro_batches())
PAIRS = MICRO_BATCHES[0].pairs


class Encoded(Exception):
    """The encoder was asked for: from there on an encoder-decoder model goes another way."""


def model_of() -> Any:
    """Return ``tiny_causal_lm`` with a decoder of its own, whose states are the tokens as unit vectors."""
    model = tiny_causal_lm()

    def decoder(input_ids: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids, len(model.weight)).float())

    def encoder() -> None:
        raise Encoded

    model.get_decoder, model.get_encoder = lambda: decoder, encoder
    model.get_output_embeddings = lambda: SimpleNamespace(weight=model.weight.t())
    return model


def stub(**attributes: Any) -> Any:
    """Return a trainer whose Liger loss is the sum of the log-probs of the rows, each times its number."""
    given: list[tuple[int, int | None]] = []

    def numbered_rows(weight: Any, hidden: Any, labels: Any, ref_input: Any = None, **kwargs: Any) -> Any:
        given.append((len(labels), None if ref_input is None else len(ref_input)))
        is_label = labels != -100
        log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, labels.where(is_label, 0)[..., None])[..., 0]
        # Then come log-probs and mean logits of chosen and rejected, the loss of rpo_alpha and both rewards.
        return weighted((log_probs * is_label).sum(1)), (0.0,) * 7

    defaults = {"padding_free": True, "reference_free": True, "label_pad_token_id": -100, "given": given}
    state = SimpleNamespace(global_step=0)
    return dpo_stub(
        dpo_trainer, **{**defaults, "model": model_of(), "state": state, "dpo_loss_fn": numbered_rows, **attributes}
    )


def weighted(rows: Any) -> Any:
    return (rows * torch.arange(1, 1 + len(rows))).sum()


def loss_of(trainer: Any, pairs: Sequence[Pair] = PAIRS) -> Any:
    return trainer._compute_loss_liger(model=trainer.model, batch=pair_batch(dpo_trainer, pairs))["loss"]


def expected(trainer: Any, pairs: Sequence[Pair] = PAIRS) -> Any:
    return weighted(torch.cat(pair_log_probs(trainer.model, pairs)))


def gradient(loss: Any, trainer: Any) -> Any:
    return torch.autograd.grad(loss, trainer.model.weight)[0]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_each_micro_batch_has_a_row_for_each_sequence(training: bool) -> None:
    trainer = stub()
    trainer.model.train(training)
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        loss, right = loss_of(trainer, micro_batch.pairs), expected(trainer, micro_batch.pairs)
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(gradient(loss, trainer), gradient(right, trainer))


def test_each_trainer_has_a_row_for_each_sequence() -> None:
    for _ in range(2):
        trainer = stub()
        torch.testing.assert_close(loss_of(trainer), expected(trainer))


def test_the_reference_has_a_row_for_each_sequence() -> None:
    trainer = stub(reference_free=False, ref_model=model_of())
    loss_of(trainer)
    assert trainer.given == [(2 * len(PAIRS), 2 * len(PAIRS))]


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_trl_gives_liger_one_row(micro_batch: Any, switch: Any) -> None:
    trainer = stub()
    trainer.model.train(micro_batch.is_training)
    with switch.off():
        loss = loss_of(trainer, micro_batch.pairs)
    torch.testing.assert_close(loss, torch.cat(pair_log_probs(trainer.model, micro_batch.pairs)).sum())
    assert trainer.given == [(1, None)]


def test_each_trainer_is_warned_once(messages: list[str]) -> None:
    for _ in range(2):
        trainer = stub()
        for _ in range(2):
            loss_of(trainer)
    assert len(messages) == 2
    assert all("The batches are padded instead" in message for message in messages)


def test_a_padded_batch_stays_as_it_is(messages: list[str]) -> None:
    trainer = stub(padding_free=False)
    torch.testing.assert_close(loss_of(trainer), expected(trainer))
    assert not messages


def test_an_encoder_decoder_model_is_not_warned_of(messages: list[str]) -> None:
    with pytest.raises(Encoded):
        loss_of(stub(is_encoder_decoder=True))
    assert not messages


def test_the_trainer_keeps_its_padding_free_also_after_an_error() -> None:
    trainer = stub()
    loss_of(trainer)
    assert trainer.padding_free is True
    with pytest.raises(KeyError):
        trainer._compute_loss_liger(trainer.model, {})
    assert trainer.padding_free is True
