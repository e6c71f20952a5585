"""With keep_end the model is given the last max_length tokens of each sequence, whatever the lengths of the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import Pair, dpo_stub, forwarded, pair_batch, pair_micro_batches, tiny_causal_lm

MICRO_BATCHES = tuple(pair_micro_batches())
PAIRS = MICRO_BATCHES[0].pairs
MAX_LENGTH = 5
"""Longer than the completions of these pairs: a token of each prompt is left."""


def stub(**attributes: Any) -> Any:
    defaults = {"truncation_mode": "keep_end", "max_length": MAX_LENGTH, "label_pad_token_id": -100}
    state = SimpleNamespace(global_step=0)
    return dpo_stub(dpo_trainer, **{**defaults, "model": tiny_causal_lm(), "state": state, **attributes})


def sequences(pairs: Sequence[Pair] = PAIRS) -> list[tuple[list[int], list[int]]]:
    """Return prompt and completion of each sequence, the chosen before the rejected."""
    return [(pair.prompt, pair.chosen) for pair in pairs] + [(pair.prompt, pair.rejected) for pair in pairs]


WHOLE = [prompt + completion for prompt, completion in sequences()]


def log_probs(model: Any, pairs: Sequence[Pair], *, by_column: bool) -> Any:
    """Return the log-prob of each completion in the last tokens of its sequence, or in the last columns of all."""
    width = max(len(prompt) + len(completion) for prompt, completion in sequences(pairs)) if by_column else 0
    summed = []
    for prompt, completion in sequences(pairs):
        padding = [0] * (width - len(prompt) - len(completion))
        tokens = torch.tensor([*prompt, *completion, *padding])[-MAX_LENGTH:]
        is_completion = torch.tensor([0] * len(prompt) + [1] * len(completion) + padding)[-MAX_LENGTH:]
        # TRL rolls the labels: the first token of a row is predicted by the last one. It is a prompt's, if it is right.
        of_tokens = model.weight[tokens.roll(1)].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        summed.append((of_tokens * is_completion).sum())
    return torch.stack(summed)


def measured(trainer: Any, pairs: Sequence[Pair]) -> Any:
    outputs = trainer.concatenated_forward(model=trainer.model, batch=pair_batch(dpo_trainer, pairs))
    return torch.cat([outputs["chosen_logps"], outputs["rejected_logps"]])


def gradient(values: Any, model: Any) -> Any:
    """Return the gradient of the sum of log-probs, each with a weight of its own."""
    weights = torch.arange(1, 1 + len(values))
    return torch.autograd.grad((values * weights).sum(), model.weight)[0]


def given(trainer: Any, pairs: Sequence[Pair] = PAIRS) -> tuple[list[list[int]], int]:
    """Return the tokens that the model is given of each sequence, and the number of columns."""
    passed = forwarded(trainer, trainer.model, pair_batch(dpo_trainer, pairs))
    token_ids = passed["input_ids"]
    mask = passed.get("attention_mask", torch.ones_like(token_ids))
    rows = [row[is_token.bool()].tolist() for row, is_token in zip(token_ids, mask, strict=True)]
    return rows, token_ids.shape[1]


def in_columns(rows: list[list[int]]) -> tuple[list[list[int]], int]:
    return rows, max(map(len, rows))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_log_probs_of_each_micro_batch_are_those_of_the_ends(training: bool) -> None:
    trainer = stub()
    model = trainer.model.train(training)
    for micro_batch in MICRO_BATCHES:
        trainer.state.global_step = micro_batch.step
        values, right = measured(trainer, micro_batch.pairs), log_probs(model, micro_batch.pairs, by_column=False)
        torch.testing.assert_close(values, right)
        torch.testing.assert_close(gradient(values, model), gradient(right, model))


@pytest.mark.parametrize("micro_batch", MICRO_BATCHES)
def test_trl_has_the_log_probs_of_the_last_columns(micro_batch: Any, switch: Any) -> None:
    trainer = stub()
    model = trainer.model.train(micro_batch.is_training)
    with switch.off():
        torch.testing.assert_close(
            measured(trainer, micro_batch.pairs), log_probs(model, micro_batch.pairs, by_column=True)
        )


def test_each_trainer_keeps_the_ends_of_its_own_length() -> None:
    trainers = {length: stub(max_length=length) for length in (3, 4)}
    for _ in range(2):
        for length, trainer in trainers.items():
            assert given(trainer) == in_columns([tokens[-length:] for tokens in WHOLE])


@pytest.mark.parametrize("length", range(1, 8))
def test_the_model_is_given_the_end_of_each_sequence(length: int) -> None:
    assert given(stub(max_length=length)) == in_columns([tokens[-length:] for tokens in WHOLE])


@pytest.mark.parametrize("length", range(1, 8))
def test_a_flattened_batch_has_the_end_of_each_sequence(length: int) -> None:
    expected = list(itertools.chain.from_iterable(tokens[-length:] for tokens in WHOLE))
    assert given(stub(max_length=length, padding_free=True)) == ([expected], len(expected))


@pytest.mark.parametrize("length", [None, 0])
def test_without_a_length_the_sequences_stay_whole(length: int | None) -> None:
    assert given(stub(max_length=length)) == in_columns(WHOLE)


def test_sequences_of_one_length_are_trls_to_cut() -> None:
    pairs = [Pair([1, 2], [3, 4, 9], [5, 6, 7], (0.0, 0.0)), Pair([8, 9, 1], [2, 3], [4, 5], (0.0, 0.0))]
    whole = [prompt + completion for prompt, completion in sequences(pairs)]
    assert given(stub(max_length=3), pairs) == in_columns([tokens[-3:] for tokens in whole])


@pytest.mark.parametrize(
    ("settings", "pairs"),
    [
        ({"max_length": 7}, PAIRS),
        ({"max_length": 3}, [Pair([1, 2], [3, 4], [5, 6], (0.0, 0.0))]),
        ({"max_length": None}, PAIRS),
        ({"truncation_mode": "keep_start"}, PAIRS),
        ({"is_encoder_decoder": True}, PAIRS),
    ],
    ids=["nothing is longer", "one length", "no length", "keep_start", "encoder-decoder"],
)
def test_trl_has_its_own_inputs_where_it_cuts_rightly(settings: dict[str, Any], pairs: Sequence[Pair]) -> None:
    trainer = stub(**settings)
    own = trainer.concatenated_inputs
    seen = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append("concatenated_inputs" in vars(trainer))
        return own(*args, **kwargs)

    type(trainer).concatenated_inputs = staticmethod(noted)
    given(trainer, pairs)
    # TRL's own call is the last one.
    assert seen in ([False], [False, False])


def test_keep_start_keeps_the_start() -> None:
    assert given(stub(truncation_mode="keep_start")) == in_columns([tokens[:MAX_LENGTH] for tokens in WHOLE])


def test_an_encoder_decoder_model_is_given_whole_prompts() -> None:
    assert given(stub(is_encoder_decoder=True)) == in_columns([pair.prompt for pair in PAIRS] * 2)


def test_a_forward_leaves_nothing_on_the_trainer_also_after_an_error() -> None:
    trainer = stub()
    measured(trainer, PAIRS)
    assert "concatenated_inputs" not in vars(trainer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    trainer.model.forward = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        measured(trainer, PAIRS)
    assert "concatenated_inputs" not in vars(trainer)


def test_the_batch_stays_as_it_is() -> None:
    trainer, batch = stub(), pair_batch(dpo_trainer, PAIRS)
    before = {name: value.clone() for name, value in batch.items()}
    trainer.concatenated_forward(trainer.model, batch)
    torch.testing.assert_close(batch, before)
