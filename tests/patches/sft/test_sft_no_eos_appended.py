"""What is tokenised ends once, in every column and format. Conversations and tokens stay as they are."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.sft import sft_no_eos_appended
from trl_hotfix.patches.sft.sft_no_eos_appended import end_what_is_tokenised
from trl_hotfix.testing import CharacterTokenizer, messages, only_iterable, sft_prepared, stream

import tiny

TEXTS, ENDED = ["ab", "c", "ab\1", "\1d"], ["ab\1", "c\1", "ab\1", "\1d\1"]


class Typed(CharacterTokenizer):
    """Returns ``token_type_ids``, too."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        encoded = super().__call__(text)
        encoded["token_type_ids"] = [0] * len(text)
        return encoded


def tokenised(rows: list[dict[str, Any]], function: Any = None, field: str = "text") -> list[str]:
    """Return what is tokenised of each row. Its masks and types are as long."""
    found = []
    for row in sft_prepared(sft_trainer, rows, Typed(), function, dataset_text_field=field):
        assert row["attention_mask"] == [1] * len(row["input_ids"])
        # 0.15 keeps the ids alone.
        assert row.get("token_type_ids", [0] * len(row["input_ids"])) == [0] * len(row["input_ids"])
        found.append("".join(map(chr, row["input_ids"])))
    return found


def column(name: str) -> list[dict[str, str]]:
    return [{name: text} for text in TEXTS]


def test_each_text_ends_once() -> None:
    assert tokenised(column("text")) == ENDED


def test_trl_ends_no_text(switch: Any) -> None:
    with switch.off():
        assert tokenised(column("text")) == TEXTS


def test_each_text_of_another_field_ends_once() -> None:
    assert tokenised(column("content"), field="content") == ENDED


def test_what_a_formatting_function_returns_ends_once() -> None:
    assert tokenised(column("question"), lambda row: row["question"]) == ENDED


def test_each_pair_ends_once() -> None:
    assert tokenised([{"prompt": "z", "completion": text} for text in TEXTS]) == [f"z{text}" for text in ENDED]


def test_an_empty_text_is_an_end() -> None:
    assert tokenised([{"text": ""}]) == ["\1"]


TURNS = messages("uab", "ac")


def test_a_conversation_ends_as_its_template_says(switch: Any) -> None:
    assert tokenised([{"messages": TURNS}]) == ["uab\1ac\1"]
    with switch.off():
        assert tokenised([{"messages": TURNS}]) == ["uab\1ac\1"]


@pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["a dataset", "a stream"])
def test_a_trainer_trains_and_evaluates_on_texts_that_end(make: Any, tmp_path: Path) -> None:
    texts = [{"text": f"w{number} w2"} for number in (4, 6, 8)]
    words = tiny.tokenizer()
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, max_steps=1),
        train_dataset=make(texts[:2]),
        eval_dataset=make(texts[2:]),
        tokenizer=words,
    )
    assert [row["input_ids"] for row in trainer.train_dataset] == [[7, 5, 1], [9, 5, 1]]
    assert [row["input_ids"] for row in trainer.eval_dataset] == [[11, 5, 1]]
    # The user's tokenizer is as it was.
    assert trainer.processing_class is words
    assert words("w1")["input_ids"] == [4]


def prepare(dataset: Any, processing_class: Any, formatting_func: Any) -> Any:
    """Stand for TRL's method, and return the tokenizer that it is given."""
    return processing_class


def handed_on(dataset: Any, tokenizer: Any, function: Any = None) -> Any:
    return end_what_is_tokenised(Call(prepare, None, (dataset, tokenizer), {"formatting_func": function}))


def without_end() -> Any:
    words: Any = CharacterTokenizer()
    words.eos_token_id = None
    return words


WORDS, TEXT = CharacterTokenizer(), {"text": "ab"}
TOKENS = only_iterable({**TEXT, "input_ids": [97]})


@pytest.mark.parametrize(
    ("dataset", "function"),
    [(only_iterable(TEXT), None), (only_iterable({"messages": TURNS}), str)],
    ids=["a text", "a formatted conversation"],
)
def test_trl_has_a_tokenizer_that_ends_texts(dataset: Any, function: Any) -> None:
    given = handed_on(dataset, WORDS, function)
    assert given("a")["input_ids"] == [97, 1]
    assert given.__wrapped__ is WORDS
    assert WORDS("a")["input_ids"] == [97]


LEFT_ALONE: dict[str, tuple[Any, Any, Any]] = {
    "a conversation": (only_iterable({"messages": TURNS}), WORDS, None),
    "tokens": (TOKENS, WORDS, None),
    "formatted tokens": (TOKENS, WORDS, str),
    "no dataset": ([TEXT], WORDS, None),
    "no end": (only_iterable(TEXT), without_end(), None),
    "a processor": (only_iterable(TEXT), SimpleNamespace(tokenizer=WORDS), None),
}


@pytest.mark.parametrize(("dataset", "tokenizer", "function"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_trl_has_its_own_tokenizer(dataset: Any, tokenizer: Any, function: Any) -> None:
    assert handed_on(dataset, tokenizer, function) is tokenizer


def test_an_older_conversation_stays_as_it_is_where_trl_takes_it() -> None:
    if not hasattr(sft_trainer, "maybe_convert_to_chatml"):
        pytest.skip("this release takes no conversations of the older form")
    dataset = only_iterable({"conversations": [{"from": "user", "value": "ab"}]})
    assert handed_on(dataset, WORDS) is WORDS


def test_the_view_of_the_tokenizer_can_be_pickled() -> None:
    view = pickle.loads(pickle.dumps(handed_on(only_iterable(TEXT), WORDS)))
    assert view("a")["input_ids"] == [97, 1]
    assert type(view.__wrapped__) is CharacterTokenizer


def test_the_key_of_the_cache_changes_with_the_code() -> None:
    digest = hashlib.sha256(Path(sft_no_eos_appended.__file__).read_bytes()).hexdigest()
    assert digest.encode() in pickle.dumps(handed_on(only_iterable(TEXT), WORDS))
