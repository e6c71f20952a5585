"""No sequence of a batch depends on those before it, and models that keep them apart are still given one row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.authoring import why_sequences_mix
from trl_hotfix.testing import (
    Pair,
    dpo_stub,
    forwarded,
    pair_batch,
    pair_micro_batches,
    tiny_attention_model,
    tiny_causal_lm,
    wrapped_like_deepspeed,
)

pytestmark = pytest.mark.usefixtures("messages")

MICRO_BATCHES = tuple(pair_micro_batches())
PAIRS = MICRO_BATCHES[0].pairs


def stub(model: Any, **attributes: Any) -> Any:
    defaults = {"padding_free": True, "label_pad_token_id": -100, "state": SimpleNamespace(global_step=0)}
    return dpo_stub(dpo_trainer, **{**defaults, "model": model, **attributes})


def mixing() -> Any:
    """Return a model whose logits are a mean over the tokens that it attends to.

    It attends to the whole row unless the attention mask leaves tokens out, like any model that makes its mask itself.
    """
    model = tiny_causal_lm()

    def attend_to_all(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        mask = kwargs.get("attention_mask", torch.ones_like(args[0]))[..., None]
        outputs.logits = (outputs.logits * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)

    model.register_forward_hook(attend_to_all, with_kwargs=True)
    return model


def flash() -> Any:
    return tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))


def log_probs(model: Any, pairs: Sequence[Pair], *, mixed: bool = False) -> Any:
    """Return the log-prob of each completion, the chosen before the rejected: alone, or after all before it."""
    sequences = [(pair.prompt, pair.chosen) for pair in pairs] + [(pair.prompt, pair.rejected) for pair in pairs]
    before: list[int] = []
    summed = []
    for prompt, completion in sequences:
        tokens = torch.tensor([*before, *prompt, *completion])
        logits = model.weight[tokens].cumsum(0) / torch.arange(1, 1 + len(tokens))[:, None]
        of_tokens = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])
        summed.append(of_tokens[-len(completion) :].sum())
        before = tokens.tolist() if mixed else []
    return torch.stack(summed)


def measured(trainer: Any, pairs: Sequence[Pair], model: Any = None, **kwargs: Any) -> Any:
    model = model if model is not None else trainer.model
    outputs = trainer.concatenated_forward(model=model, batch=pair_batch(dpo_trainer, pairs), **kwargs)
    return torch.cat([outputs["chosen_logps"], outputs["rejected_logps"]])


def gradient(values: Any, model: Any) -> Any:
    """Return the gradient of the sum of log-probs, each with a weight of its own."""
    weights = torch.arange(1, 1 + len(values))
    return torch.autograd.grad((values * weights).sum(), model.weight)[0]


def is_flattened(trainer: Any, model: Any = None) -> bool:
    model = model if model is not None else trainer.model
    # The labels of an encoder-decoder model are masked in place.
    return len(forwarded(trainer, model, pair_batch(dpo_trainer, PAIRS))["input_ids"]) == 1


def makes_no_cache() -> bool:
    """Return whether TRL tells the model to make no cache, as 0.18.0 and later do."""
    model = flash()
    passed = forwarded(stub(model, padding_free=False), model, pair_batch(dpo_trainer, PAIRS))
    return passed.get("use_cache") is False


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_log_probs_of_each_micro_batch_are_those_of_each_sequence_alone(training: bool) -> None:
    trainer = stub(mixing())
    model = trainer.model.train(training)
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        values, right = measured(trainer, micro_batch.pairs), log_probs(model, micro_batch.pairs)
        torch.testing.assert_close(values, right)
        torch.testing.assert_close(gradient(values, model), gradient(right, model))


def test_each_trainer_is_padded() -> None:
    for _ in range(2):
        trainer = stub(mixing())
        torch.testing.assert_close(measured(trainer, PAIRS), log_probs(trainer.model, PAIRS))


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_trl_mixes_all_sequences_of_a_batch(micro_batch: Any, switch: Any) -> None:
    trainer = stub(mixing())
    model = trainer.model.train(micro_batch.is_training)
    with switch.off():
        torch.testing.assert_close(
            measured(trainer, micro_batch.pairs), log_probs(model, micro_batch.pairs, mixed=True)
        )


def test_flash_attention_keeps_its_one_row(messages: list[str]) -> None:
    trainer = stub(flash())
    assert [is_flattened(trainer) for _ in range(2)] == [True, True]
    assert not messages


def test_llama_is_padded_where_transformers_does_not_keep_sequences_apart(messages: list[str]) -> None:
    model = tiny_attention_model()
    mixes = why_sequences_mix(model, no_cache=makes_no_cache()) is not None
    trainer = stub(model)
    assert [is_flattened(trainer) for _ in range(2)] == [not mixes] * 2
    assert len(messages) == mixes


@pytest.mark.parametrize(("wrapped", "flattened"), [(flash, True), (mixing, False)], ids=["flash", "mixing"])
def test_a_wrapped_model_is_asked_beneath_its_wrapping(wrapped: Any, flattened: bool) -> None:
    trainer = stub(wrapped())
    engine = wrapped_like_deepspeed(trainer.model)
    trainer.accelerator.unwrap_model = lambda model: model.module
    assert is_flattened(trainer, engine) is flattened


def test_the_model_of_the_call_is_asked_and_not_the_trainers() -> None:
    trainer, reference = stub(flash()), mixing()
    torch.testing.assert_close(measured(trainer, PAIRS, reference), log_probs(reference, PAIRS))
    assert is_flattened(trainer)


def test_a_forward_of_the_reference_is_one_of_the_reference() -> None:
    if "is_ref_model" not in inspect.signature(dpo_trainer.DPOTrainer.concatenated_forward).parameters:
        pytest.skip("this release does not say which forward is the reference's")
    trainer = stub(mixing())
    trainer.args.ld_alpha = 0.5  # of the policy alone
    values = measured(trainer, PAIRS, is_ref_model=True)
    torch.testing.assert_close(values, log_probs(trainer.model, PAIRS))


@pytest.mark.parametrize("setting", [{"padding_free": False}, {"is_encoder_decoder": True}])
def test_a_batch_that_is_never_flattened_is_not_warned_of(setting: dict[str, bool], messages: list[str]) -> None:
    assert not is_flattened(stub(mixing(), **setting))
    assert not messages


def test_each_trainer_is_warned_once_with_the_reason(messages: list[str]) -> None:
    for _ in range(2):
        trainer = stub(mixing())
        for _ in range(2):
            assert not is_flattened(trainer)
    reason = why_sequences_mix(mixing(), no_cache=makes_no_cache())
    assert len(messages) == 2
    assert all(f"would attend to one another: {reason}. The batches are padded" in message for message in messages)


def test_the_trainer_keeps_its_padding_free_also_after_an_error() -> None:
    trainer = stub(mixing())
    measured(trainer, PAIRS)
    assert trainer.padding_free is True
    with pytest.raises(KeyError):
        trainer.concatenated_forward(trainer.model, {})
    assert trainer.padding_free is True
