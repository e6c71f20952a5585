"""Texts end once, whatever the name of their column. All other datasets are handed on as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.sft.sft_eos_custom_text_field import end_the_texts
from trl_hotfix.testing import CharacterTokenizer, only_iterable, sft_prepared, stream

import tiny

TEXTS = ["ab", "c", "ab\1"]
MESSAGES = [{"role": "user", "content": "ab"}]


class Ending(CharacterTokenizer):
    """Ends what it tokenises."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text + "\1", **kwargs)


class Starting(CharacterTokenizer):
    """Begins texts with the token that ends them."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__("\1" + text, **kwargs)


class Unknowing(CharacterTokenizer):
    """Does not know the letter a. Its token for unknown letters is that of the end."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text.replace("a", "\1"), **kwargs)


def tokenised(texts: list[str], field: str = "content") -> list[str]:
    rows = [{field: text} for text in texts]
    prepared = sft_prepared(sft_trainer, rows, CharacterTokenizer(), dataset_text_field=field)
    return ["".join(map(chr, row["input_ids"])) for row in prepared]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[::-1]], ids=["the last ends already", "the first ends already"])
def test_each_text_ends_once(texts: list[str]) -> None:
    assert tokenised(texts) == [text.removesuffix("\1") + "\1" for text in texts]


def test_trl_does_not_end_the_texts(switch: Any) -> None:
    with switch.off():
        assert tokenised(TEXTS) == TEXTS


def test_texts_in_a_column_text_end_as_before(switch: Any) -> None:
    assert tokenised(TEXTS, "text") == ["ab\1", "c\1", "ab\1"]
    with switch.off():
        assert tokenised(TEXTS, "text") == ["ab\1", "c\1", "ab\1"]


@pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["a dataset", "a stream"])
def test_a_trainer_trains_and_evaluates_on_texts_that_end(make: Any, tmp_path: Path) -> None:
    texts = [{"content": f"w{number} w2"} for number in (4, 6, 8)]
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, max_steps=1, dataset_text_field="content"),
        train_dataset=make(texts[:2]),
        eval_dataset=make(texts[2:]),
        tokenizer=tiny.tokenizer(),
    )
    assert [row["input_ids"] for row in trainer.train_dataset] == [[7, 5, 1], [9, 5, 1]]
    assert [row["input_ids"] for row in trainer.eval_dataset] == [[11, 5, 1]]


def prepare(dataset: Any, processing_class: Any, args: Any, formatting_func: Any, dataset_name: str = "train") -> Any:
    """Stand for TRL's method, and return the dataset that it is given."""
    return dataset


def handed_on(dataset: Any, tokenizer: Any = None, function: Any = None, field: str = "content") -> Any:
    settings = SimpleNamespace(dataset_text_field=field, dataset_num_proc=None)
    words = CharacterTokenizer() if tokenizer is None else tokenizer
    return end_the_texts(Call(prepare, None, (dataset, words, settings, function)))


@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [
        ("ab", CharacterTokenizer()),
        ("ab", SimpleNamespace(tokenizer=CharacterTokenizer())),
        ("bc", Unknowing()),
        ("", Starting()),
    ],
    ids=["a tokenizer", "a processor", "the letter a is unknown", "an empty text"],
)
def test_the_first_text_shows_whether_the_tokenizer_ends_texts(text: str, tokenizer: Any) -> None:
    assert list(handed_on(stream([{"content": text}]), tokenizer)) == [{"content": f"{text}\1"}]


def test_other_columns_stay_as_they_are() -> None:
    row = {"content": "ab", "text": "c", "completion": "d", "number": 1}
    assert list(handed_on(stream([row]))) == [{**row, "content": "ab\1"}]


def without_end() -> Any:
    words: Any = CharacterTokenizer()
    words.eos_token = None
    return words


TEXT: dict[str, Any] = {"content": "ab"}
LEFT_ALONE: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "no end of sequence": (TEXT, without_end(), None),
    "a processor without one": (TEXT, SimpleNamespace(), None),
    "a formatting function": (TEXT, None, str),
    "a tokenizer that ends the texts": (TEXT, Ending(), None),
    "a processor that ends the texts": (TEXT, SimpleNamespace(tokenizer=Ending()), None),
    "a text that ends already, and a tokenizer that ends it": ({"content": "ab\1"}, Ending(), None),
    "tokens": ({**TEXT, "input_ids": [97]}, None, None),
    "a pair": ({**TEXT, "prompt": "ab"}, None, None),
    "no text": ({"content": [97]}, None, None),
    "no such column": ({"other": "ab"}, None, None),
    "a conversation": ({**TEXT, "messages": MESSAGES}, None, None),
    "an older conversation": ({**TEXT, "conversations": [{"from": "user", "value": "ab"}]}, None, None),
}


@pytest.mark.parametrize(("row", "tokenizer", "function"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_the_dataset_stays_as_it_is(row: dict[str, Any], tokenizer: Any, function: Any) -> None:
    dataset = only_iterable(row)
    assert handed_on(dataset, tokenizer, function) is dataset


def test_a_text_field_called_text_stays_as_it_is() -> None:
    dataset = only_iterable({"text": "ab"})
    assert handed_on(dataset, field="text") is dataset


def test_what_is_no_dataset_stays_as_it_is() -> None:
    dataset = [TEXT]
    assert handed_on(dataset) is dataset
