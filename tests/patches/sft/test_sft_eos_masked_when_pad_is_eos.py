"""Ends of sequence are labels where the padding token is the same, and padding is not. Other collators stay."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.testing import (
    CharacterTokenizer,
    as_tokenizer_of,
    constructed,
    default_arguments,
    single_process,
    tiny_causal_lm,
)

import tiny

ID, TARGET = "sft-eos-masked-when-pad-is-eos", "trl.trainer.sft_trainer:SFTTrainer.__init__"

ROWS = ["a\1", "abc\1", "\1b\1"]
ENDS = [[97, 1, -100, -100], [97, 98, 99, 1], [1, 98, 1, -100]]
NO_ENDS = [[97, -100, -100, -100], [97, 98, 99, -100], [-100, 98, -100, -100]]


def words(end: int | None = 1, padding: int | None = 1) -> Any:
    tokenizer: Any = CharacterTokenizer()
    tokenizer.eos_token_id = end
    tokenizer.pad_token_id, tokenizer.pad_token = padding, tokenizer.eos_token
    return tokenizer


def trainer_of(tokenizer: Any = None, *, training: bool = True, **arguments: Any) -> Any:
    """Return a trainer that its own constructor has made, without that of transformers."""
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text"}
    settings |= arguments.pop("settings", {})
    model = tiny_causal_lm(SimpleNamespace(_name_or_path="tiny", _attn_implementation="eager")).train(training)
    arguments |= {"model": model, "args": default_arguments(sft_trainer.SFTConfig, **settings)}
    arguments |= as_tokenizer_of(sft_trainer.SFTTrainer, words() if tokenizer is None else tokenizer)
    with single_process(sft_trainer):
        return constructed(sft_trainer.SFTTrainer, **arguments)


def labels_of(collator: Any) -> list[list[int]]:
    labels: list[list[int]] = collator([CharacterTokenizer()(text) for text in ROWS])["labels"].tolist()
    return labels


def is_changed(trainer: Any) -> bool:
    return "torch_call" in vars(trainer.data_collator)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_ends_are_labels_and_padding_is_not_in_each_batch_of_each_trainer(training: bool) -> None:
    for _ in range(2):
        trainer = trainer_of(training=training)
        assert [labels_of(trainer.data_collator) for _ in range(2)] == [ENDS] * 2
        assert tiny.acts(ID, TARGET, trainer) == 1


def test_trl_makes_no_end_a_label(switch: Any) -> None:
    with switch.off():
        assert labels_of(trainer_of().data_collator) == NO_ENDS


def test_the_rest_of_the_batch_is_that_of_the_collator(switch: Any) -> None:
    examples = [CharacterTokenizer()(text) for text in ROWS]
    patched = trainer_of().data_collator(examples)
    with switch.off():
        batch = trainer_of().data_collator(examples)
    assert patched.keys() == batch.keys()
    assert all(patched[name].equal(batch[name]) for name in batch if name != "labels")


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_trainer_trains_and_evaluates_on_ends(packing: bool, tmp_path: Path) -> None:
    ending = tiny.tokenizer()
    ending.pad_token = ending.eos_token
    rows = [{"text": text} for text in ("w1 <eos>", "w2 w3 <eos>", "w4 w5 w6 <eos>")]
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, dataset_text_field="text", packing=packing, max_seq_length=3, max_length=3),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[::-1]),
        tokenizer=ending,
    )
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        batch = next(iter(loader))
        # A packed sequence has no padding.
        padding = batch["input_ids"] < 0 if packing else batch["attention_mask"] == 0
        assert batch["labels"].equal(batch["input_ids"].masked_fill(padding, -100))


def test_a_worker_process_can_have_the_collator() -> None:
    ending = tiny.tokenizer()
    ending.pad_token = ending.eos_token
    collator = pickle.loads(pickle.dumps(trainer_of(ending).data_collator))
    batch = collator([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in ([5, 1], [5, 6, 1])])
    assert batch["labels"].tolist() == [[5, 1, -100], [5, 6, 1]]


def test_without_an_attention_mask_the_labels_stay() -> None:
    tokenizer = words()
    padded = tokenizer.pad
    tokenizer.pad = lambda *args, **kwargs: {"input_ids": padded(*args, **kwargs)["input_ids"]}
    trainer = trainer_of(tokenizer)
    assert is_changed(trainer)
    assert labels_of(trainer.data_collator) == NO_ENDS


@pytest.mark.parametrize(
    "tokenizer", [words(padding=0), words(None, None), words(None, 1)], ids=["its own", "neither token", "no end"]
)
def test_a_tokenizer_with_another_padding_leaves_the_collator(tokenizer: Any) -> None:
    trainer = trainer_of(tokenizer)
    assert not is_changed(trainer)
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_a_collator_that_is_passed_stays() -> None:
    collator = DataCollatorForLanguageModeling(tokenizer=words(), mlm=False)
    trainer = trainer_of(data_collator=collator)
    assert trainer.data_collator is collator
    assert not is_changed(trainer)


class Own(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """A user's collator."""


def of_masked_words(tokenizer: Any, **kwargs: Any) -> Any:
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)
    collator.mlm = True
    return collator


@pytest.mark.parametrize("made", [Own, of_masked_words], ids=["a subclass", "masked words"])
def test_another_default_collator_stays(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_trainer, "DataCollatorForLanguageModeling", made)
    assert not is_changed(trainer_of())


def test_a_batch_without_padding_has_its_own_collator() -> None:
    if "padding_free" not in sft_trainer.SFTConfig.__dataclass_fields__:
        pytest.skip("this release pads each batch")
    assert not is_changed(trainer_of(settings={"padding_free": True}))
