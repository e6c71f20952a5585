"""The model is given each sequence whole, padding alone is cut off, and log-probs are those of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import dpo_trainer

from trl_hotfix.testing import Pair, dpo_stub, forwarded, pair_batch, pair_log_probs, tiny_causal_lm

CHOSEN_LONGEST = Pair([1, 2], [3, 4, 9, 7], [5, 6], (0.0, 0.0))
REJECTED_LONGEST = Pair([8], [9, 3], [4, 1, 10, 2, 6], (0.0, 0.0))
LONG_PROMPT = Pair([2, 5, 6], [7], [1, 3], (0.0, 0.0))
LONGEST_OF_BOTH = Pair([9, 1, 4, 2], [6, 10], [3, 5, 5, 1, 2], (0.0, 0.0))

CUT = (
    (CHOSEN_LONGEST, LONG_PROMPT),
    (LONG_PROMPT, REJECTED_LONGEST, CHOSEN_LONGEST),
    (REJECTED_LONGEST, LONG_PROMPT),
    (REJECTED_LONGEST, CHOSEN_LONGEST),
    (LONG_PROMPT, CHOSEN_LONGEST),
)
"""Batches in which the longest prompt has not the longest completion: TRL cuts their longest sequence."""
WHOLE = ((LONGEST_OF_BOTH, CHOSEN_LONGEST), (CHOSEN_LONGEST,), (LONG_PROMPT, LONGEST_OF_BOTH))
"""Batches that TRL leaves whole."""


def stub(max_length: int | None = None, **attributes: Any) -> Any:
    trainer = dpo_stub(dpo_trainer, model=tiny_causal_lm(), state=SimpleNamespace(global_step=0), **attributes)
    trainer.args.max_length = max_length
    return trainer


def sequences(pairs: Sequence[Pair]) -> list[list[int]]:
    """Return the tokens of each sequence, the chosen before the rejected."""
    return [pair.prompt + pair.chosen for pair in pairs] + [pair.prompt + pair.rejected for pair in pairs]


def given(trainer: Any, pairs: Sequence[Pair]) -> tuple[list[list[int]], int]:
    """Return the tokens that the model is given of each sequence, and the number of columns."""
    passed = forwarded(trainer, trainer.model, pair_batch(dpo_trainer, pairs))
    rows = zip(passed["input_ids"], passed["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in rows], passed["input_ids"].shape[1]


def gradient(log_probs: Any, model: Any) -> Any:
    """Return the gradient of the sum of log-probs, each with a weight of its own."""
    weights = torch.arange(1, 1 + len(log_probs))
    return torch.autograd.grad((log_probs * weights).sum(), model.weight)[0]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_log_probs_of_each_micro_batch_are_those_of_all_tokens(training: bool) -> None:
    trainer = stub()
    model = trainer.model.train(training)
    for step, pairs in enumerate(CUT):
        trainer.state.global_step = step // 2
        outputs = trainer.concatenated_forward(model, pair_batch(dpo_trainer, pairs))
        measured = torch.cat([outputs["chosen_logps"], outputs["rejected_logps"]])
        right = torch.cat(pair_log_probs(model, pairs))
        torch.testing.assert_close(measured, right)
        torch.testing.assert_close(gradient(measured, model), gradient(right, model))


@pytest.mark.parametrize("pairs", CUT + WHOLE)
@pytest.mark.parametrize("beyond", [None, -1, 0, 1])
def test_the_model_is_given_whole_sequences_up_to_max_length(pairs: Sequence[Pair], beyond: int | None) -> None:
    whole = sequences(pairs)
    max_length = None if beyond is None else max(map(len, whole)) + beyond
    expected = [tokens[:max_length] for tokens in whole]
    assert given(stub(max_length), pairs) == (expected, max(map(len, expected)))


@pytest.mark.parametrize("pairs", CUT)
def test_trl_drops_the_last_token_of_the_longest_sequences(pairs: Sequence[Pair], switch: Any) -> None:
    whole = sequences(pairs)
    longest = max(map(len, whole))
    with switch.off():
        assert given(stub(), pairs) == ([tokens[: longest - 1] for tokens in whole], longest - 1)


def test_a_forward_leaves_nothing_on_the_trainer() -> None:
    trainer = stub()
    given(trainer, CUT[0])
    assert "concatenated_inputs" not in vars(trainer)


def test_an_encoder_decoder_model_is_given_the_labels_as_they_are() -> None:
    trainer = stub(is_encoder_decoder=True)
    labels = forwarded(trainer, trainer.model, pair_batch(dpo_trainer, CUT[0]))["labels"]
    assert labels.tolist() == [[3, 4, 9, 7], [7, -100, -100, -100], [5, 6, -100, -100], [1, 3, -100, -100]]
