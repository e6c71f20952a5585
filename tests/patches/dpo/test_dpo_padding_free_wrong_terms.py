"""Every term that counts by row is as without padding_free. Batches of other settings still are one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import (
    Pair,
    dpo_stub,
    forwarded,
    pair_batch,
    pair_log_probs,
    pair_micro_batches,
    tiny_causal_lm,
)

pytestmark = pytest.mark.usefixtures("messages")

MICRO_BATCHES = tuple(pair_micro_batches())
PAIRS = MICRO_BATCHES[0].pairs
KNOWN = {field.name for field in fields(dpo_trainer.DPOConfig)}
TAKES_LISTS = "loss_weights" in KNOWN
KEEPS_LOGITS = "use_logits_to_keep" if "use_logits_to_keep" in KNOWN else "use_num_logits_to_keep"
SETTINGS = {
    "rpo_alpha": {"rpo_alpha": 0.5},
    "ld_alpha": {"ld_alpha": 0.5},
    "use_weighting": {"use_weighting": True},
    # A release that knows both names reads the first.
    KEEPS_LOGITS: {KEEPS_LOGITS: True},
}
TERMS = [(name, setting) for name, setting in SETTINGS.items() if name in KNOWN]
TERMS.append(("loss_type='ipo'", {"loss_type": "ipo"}))
if TAKES_LISTS:
    TERMS += [(f"loss_type={name!r}", {"loss_type": ["sigmoid", name]}) for name in ("ipo", "sft")]

each_term = pytest.mark.parametrize(("term", "settings"), TERMS)


def stub(**settings: Any) -> Any:
    """Return a trainer whose model has no attention, and declares one that keeps sequences apart."""
    attributes = {"padding_free": True, "loss_type": "sigmoid", "label_pad_token_id": -100, **settings}
    model = tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))
    trainer = dpo_stub(dpo_trainer, model=model, state=SimpleNamespace(global_step=0), **attributes)
    vars(trainer.args).update(settings)
    return trainer


def outputs_of(trainer: Any, pairs: Sequence[Pair] = PAIRS) -> dict[str, Any]:
    outputs: dict[str, Any] = trainer.concatenated_forward(model=trainer.model, batch=pair_batch(dpo_trainer, pairs))
    return outputs


def log_probs_of(trainer: Any, pairs: Sequence[Pair] = PAIRS) -> Any:
    outputs = outputs_of(trainer, pairs)
    return torch.cat([outputs["chosen_logps"], outputs["rejected_logps"]])


def gradient(values: Any, model: Any) -> Any:
    """Return the gradient of the sum of log-probs, each with a weight of its own."""
    weights = torch.arange(1, 1 + len(values))
    return torch.autograd.grad((values * weights).sum(), model.weight)[0]


def summed(model: Any, pairs: Sequence[Pair]) -> tuple[Any, Any]:
    """Return the log-prob of each completion, the chosen before the rejected, and its number of tokens."""
    completions = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    return torch.cat(pair_log_probs(model, pairs)), torch.tensor([len(completion) for completion in completions])


def is_flattened(trainer: Any, batch: Mapping[str, Any] | None = None) -> bool:
    # The labels of an encoder-decoder model are masked in place.
    batch = batch if batch is not None else pair_batch(dpo_trainer, PAIRS)
    return len(forwarded(trainer, trainer.model, batch)["input_ids"]) == 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_ipo_is_a_mean_over_the_tokens_of_each_completion(training: bool) -> None:
    trainer = stub(loss_type="ipo")
    model = trainer.model.train(training)
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        measured = log_probs_of(trainer, micro_batch.pairs)
        log_probs, tokens = summed(model, micro_batch.pairs)
        torch.testing.assert_close(measured, log_probs / tokens)
        torch.testing.assert_close(gradient(measured, model), gradient(log_probs / tokens, model))


def test_each_trainer_is_padded() -> None:
    for _ in range(2):
        trainer = stub(loss_type="ipo")
        log_probs, tokens = summed(trainer.model, PAIRS)
        torch.testing.assert_close(log_probs_of(trainer), log_probs / tokens)


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_trl_divides_by_the_tokens_of_all_completions(micro_batch: Any, switch: Any) -> None:
    trainer = stub(loss_type="ipo")
    log_probs, tokens = summed(trainer.model.train(micro_batch.is_training), micro_batch.pairs)
    with switch.off():
        torch.testing.assert_close(log_probs_of(trainer, micro_batch.pairs), log_probs / tokens.sum())


@each_term
def test_what_counts_by_row_is_as_without_padding_free(term: str, settings: dict[str, Any], switch: Any) -> None:
    patched = outputs_of(stub(**settings))
    with switch.off():
        expected = outputs_of(stub(**settings, padding_free=False))
    torch.testing.assert_close(patched, expected)


@each_term
def test_trl_has_it_wrong_or_crashes(term: str, settings: dict[str, Any], switch: Any) -> None:
    with switch.off():
        expected = outputs_of(stub(**settings, padding_free=False))
        with pytest.raises((AssertionError, RuntimeError, IndexError, TypeError)):
            torch.testing.assert_close(outputs_of(stub(**settings)), expected)


@each_term
def test_each_trainer_is_warned_once_of_its_term(term: str, settings: dict[str, Any], messages: list[str]) -> None:
    for _ in range(2):
        trainer = stub(**settings)
        assert [is_flattened(trainer) for _ in range(2)] == [False, False]
    assert len(messages) == 2
    assert all(message.startswith(f"padding_free=True, but {term} would take") for message in messages)


def test_token_type_ids_are_padded_too(messages: list[str]) -> None:
    batch = pair_batch(dpo_trainer, PAIRS)
    trainer = stub()
    assert not is_flattened(trainer, {**batch, "token_type_ids": torch.zeros_like(batch["prompt_input_ids"])})
    assert is_flattened(trainer)
    (message,) = messages
    assert "token_type_ids" in message


def test_all_terms_are_named(messages: list[str]) -> None:
    assert not is_flattened(stub(loss_type="ipo", rpo_alpha=0.0))
    (message,) = messages
    assert "loss_type='ipo' and rpo_alpha would take" in message


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", *([["sigmoid", "hinge"]] * TAKES_LISTS)])
def test_other_losses_keep_their_one_row(loss_type: Any, messages: list[str]) -> None:
    trainer = stub(loss_type=loss_type)
    assert [is_flattened(trainer) for _ in range(2)] == [True, True]
    torch.testing.assert_close(log_probs_of(trainer), summed(trainer.model, PAIRS)[0])
    assert not messages


@pytest.mark.parametrize("setting", [{"padding_free": False}, {"is_encoder_decoder": True}])
def test_a_batch_that_is_never_flattened_is_not_warned_of(setting: dict[str, bool], messages: list[str]) -> None:
    assert not is_flattened(stub(loss_type="ipo", **setting))
    assert not messages


def test_the_trainer_keeps_its_padding_free_also_after_an_error() -> None:
    trainer = stub(loss_type="ipo")
    outputs_of(trainer)
    assert trainer.padding_free is True
    with pytest.raises(KeyError):
        trainer.concatenated_forward(trainer.model, {})
    assert trainer.padding_free is True
