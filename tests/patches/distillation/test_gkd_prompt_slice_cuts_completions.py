"""The loss is over all labels of rows of the dataset. What is generated is sliced as TRL does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from trl_hotfix.testing import StopConstruction, distillation_stub, divergence

import tiny

try:
    from trl.experimental.gkd.gkd_trainer import GKDConfig, GKDTrainer
except ImportError:
    from trl.trainer.gkd_trainer import GKDConfig, GKDTrainer

ID = "gkd-prompt-slice-cuts-completions"
TARGET = f"{GKDTrainer.__module__}:GKDTrainer.compute_loss"
CODE = inspect.unwrap(GKDTrainer.compute_loss).__code__
MIXES_LOG_PROBS = "logsumexp" not in inspect.unwrap(GKDTrainer.generalized_jsd_loss).__code__.co_names

Row = tuple[list[int], list[int]]
"""The token ids of a prompt and of its completion."""

ROWS: Sequence[Row] = (
    ([1, 2, 3, 4], [5, 6]),
    ([7], [8, 9, 1, 2, 3, 10]),
    ([2, 5], [4, 4, 6]),
    ([3, 1, 9], [7, 2, 8, 5]),
    ([6], [1, 10, 3]),
)
CUT = {
    "two": ROWS[:2],
    "three": ROWS[:3],
    "others": ROWS[1:4],
    "every second": ROWS[::2],
    "one token": [([7], [8, 9, 1, 2]), ([1, 2], [4, 4])],
    "all": ROWS,
}
WHOLE = {"behind the longest prompt": [([1, 2], [3, 4]), ([5], [6])], "one row": ROWS[:1]}


def left_padded(rows: Sequence[Sequence[int]], filler: int = 0) -> Any:
    longest = max(map(len, rows))
    return torch.tensor([[filler] * (longest - len(row)) + list(row) for row in rows])


def batch_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the data collator makes of these rows, padded on the left with 0."""
    return {
        "input_ids": left_padded([prompt + completion for prompt, completion in rows]),
        "attention_mask": left_padded([[1] * len(prompt + completion) for prompt, completion in rows]),
        "labels": left_padded([[-100] * len(prompt) + completion for prompt, completion in rows], -100),
        "prompts": left_padded([prompt for prompt, _ in rows]),
        "prompt_attention_mask": left_padded([[1] * len(prompt) for prompt, _ in rows]),
    }


def generated_from(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what GKD makes of these prompts if the completions are generated: padded on both sides.

    The token 2 is the padding too. The mask hides it within the prompts, up to 1.8.
    """
    prompts = left_padded([prompt for prompt, _ in rows])
    completions = left_padded([completion[::-1] for _, completion in rows]).flip(1)
    token_ids = torch.cat([prompts, completions], 1)
    is_token = (token_ids != 0) & (token_ids != 2)
    return {
        "input_ids": token_ids,
        "attention_mask": is_token.long(),
        "labels": token_ids.masked_fill(~is_token, -100),
        "prompts": prompts,
        "prompt_attention_mask": (prompts != 0).long(),
    }


def stub(*, training: bool = True) -> Any:
    trainer = distillation_stub(GKDTrainer, GKDConfig)
    trainer.model.train(training)
    return trainer


def is_over_labels_from(trainer: Any, batch: dict[str, Any], column: int) -> None:
    """Assert that the loss is the mean divergence over the labels in this column and behind it."""
    given = {name: value.clone() for name, value in batch.items()}
    loss, outputs = trainer.compute_loss(trainer.model, given, return_outputs=True)
    of_tokens = divergence(trainer, batch["input_ids"], mixes_log_probs=MIXES_LOG_PROBS)
    counted = ((batch["labels"] != -100) & (torch.arange(batch["labels"].shape[1]) >= column))[:, 1:]
    expected = (of_tokens * counted).sum() / counted.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(value, trainer.model.weight)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert outputs.logits.shape[:2] == batch["input_ids"].shape
    assert all(given[name].equal(value) for name, value in batch.items())


def width(batch: dict[str, Any]) -> int:
    return int(batch["prompts"].shape[1])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("rows", CUT.values(), ids=CUT)
def test_the_loss_is_over_whole_completions(rows: Sequence[Row], training: bool) -> None:
    trainer = stub(training=training)
    is_over_labels_from(trainer, batch_of(rows), 1)
    assert tiny.acts(ID, TARGET, trainer) == 1


@pytest.mark.parametrize("rows", CUT.values(), ids=CUT)
def test_trl_cuts_completions_where_the_longest_prompt_would_end(rows: Sequence[Row], switch: Any) -> None:
    batch = batch_of(rows)
    with switch.off():
        is_over_labels_from(stub(), batch, width(batch))


def test_each_micro_batch_of_each_trainer_is_whole() -> None:
    trainers = stub(), stub()
    for step, rows in enumerate(CUT.values()):
        for trainer in trainers:
            trainer.state.global_step = step // 2
            is_over_labels_from(trainer, batch_of(rows), 1)


@pytest.mark.parametrize("rows", WHOLE.values(), ids=WHOLE)
def test_completions_that_trl_does_not_cut_are_left_to_it(rows: Sequence[Row]) -> None:
    trainer, batch = stub(), batch_of(rows)
    is_over_labels_from(trainer, batch, width(batch))
    assert tiny.acts(ID, TARGET, trainer) == 0


@pytest.mark.parametrize("masked_as", ["up to 1.8", "later"])
def test_generated_completions_begin_behind_their_prompts(masked_as: str) -> None:
    trainer, batch = stub(), generated_from(ROWS)
    if masked_as == "later":  # and by gkd-eos-masked-when-pad-is-eos
        batch["attention_mask"][:, : width(batch)] = batch["prompt_attention_mask"]
    is_over_labels_from(trainer, batch, width(batch))
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_a_batch_without_a_mask_of_its_prompts_is_left_as_it_is() -> None:
    trainer, batch = stub(), batch_of(ROWS)
    del batch["prompt_attention_mask"]
    is_over_labels_from(trainer, batch, width(batch))


@pytest.mark.skipif("use_liger_gkd_loss" not in CODE.co_names, reason="this release has no Liger loss")
def test_the_loss_of_liger_is_given_the_batch() -> None:
    """It goes by the labels."""

    class Batch(dict[str, Any]):
        is_read = False

        def __getitem__(self, name: str) -> Any:
            self.is_read |= name == "input_ids"
            return super().__getitem__(name)

    def end(*args: Any, **kwargs: Any) -> None:
        # From 1.4.0 on the forward is given the whole batch.
        raise StopConstruction(*(inputs["input_ids"] for inputs in args[-1:]))

    trainer, batch = stub(), Batch(batch_of(ROWS))
    vars(trainer).update(use_liger_gkd_loss=True, _forward_redirection=end, _liger_student_forward=None)
    trainer.model.get_decoder = lambda: end
    with suppress(StopConstruction):
        trainer.compute_loss(trainer.model, batch)
    assert batch.is_read
