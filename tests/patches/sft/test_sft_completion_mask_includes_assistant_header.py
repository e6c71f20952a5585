"""The header of the assistant's turn is a part of the prompt. TRL tokenises everything else as before."""

from __future__ import annotations

import itertools
import pickle
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.sft.sft_completion_mask_includes_assistant_header import leave_the_header_to_the_prompt
from trl_hotfix.testing import CharacterTokenizer, messages, only_iterable, sft_prepared, stream

import tiny

PAIRS = (
    (("uab",), ("acd",), "cd\1"),
    (("sx", "uabc"), ("ad",), "d\1"),
    (("uab", "ac", "ud"), ("aefg",), "efg\1"),
    # This prompt begins with the first one and its completion.
    (("uab", "acd", "ue"), ("af", "ug", "ahi"), "f\1ug\1ahi\1"),
    (("ub",), ("acd",), "cd\1"),
)
"""Prompts, completions, and what is to be trained. The template ends each message, and ``a`` is a header."""

TRAINED = [text for *_, text in PAIRS]


def rows() -> list[dict[str, Any]]:
    return [{"prompt": messages(*prompt), "completion": messages(*completion)} for prompt, completion, _ in PAIRS]


def trained(given: list[dict[str, Any]]) -> list[str]:
    """Return what is trained of each row. The tokens of the row are those of its messages."""
    prepared = sft_prepared(sft_trainer, given, CharacterTokenizer(), completion_only_loss=True)
    texts = ["".join(map(chr, row["input_ids"])) for row in prepared]
    whole = [
        "".join(f"{turn['role'][0]}{turn['content']}\1" for turn in row["prompt"] + row["completion"]) for row in given
    ]
    assert texts == whole
    return [
        "".join(itertools.compress(text, row["completion_mask"])) for text, row in zip(texts, prepared, strict=True)
    ]


def test_headers_are_not_trained_in_any_dataset_of_any_trainer() -> None:
    for _ in range(2):
        assert trained(rows()[:2]) == TRAINED[:2]
        assert trained(rows()[2:]) == TRAINED[2:]


def test_trl_trains_the_headers(switch: Any) -> None:
    with switch.off():
        assert trained(rows()) == [f"a{text}" for text in TRAINED]


@pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["a dataset", "a stream"])
def test_a_trainer_trains_and_evaluates_without_headers(make: Any, tmp_path: Path) -> None:
    tokenizer = tiny.chat_tokenizer()
    if not isinstance(tokenizer.apply_chat_template([{"role": "user", "content": "w4"}]), list):
        pytest.skip("transformers 5 returns a dict here, which sft-prompt-length-is-that-of-a-dict repairs")
    pairs = [
        {
            "prompt": [{"role": "user", "content": f"w{number}"}],
            "completion": [{"role": "assistant", "content": "w2"}],
        }
        for number in (4, 6, 8)
    ]
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, max_steps=1),
        train_dataset=make(pairs[:2]),
        eval_dataset=make(pairs[2:]),
        tokenizer=tokenizer,
    )
    for dataset, words in ((trainer.train_dataset, [7, 9]), (trainer.eval_dataset, [11])):
        assert [row["input_ids"] for row in dataset] == [[61, word, 1, 62, 5, 1] for word in words]
        assert [row["completion_mask"] for row in dataset] == [[0, 0, 0, 0, 1, 1] for _ in words]


def test_pairs_of_texts_are_tokenised_as_before() -> None:
    pairs = [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "fgh"}]
    prepared = sft_prepared(sft_trainer, pairs, CharacterTokenizer(), completion_only_loss=True)
    assert [row["input_ids"] for row in prepared] == [list(b"abcd\1"), list(b"efgh\1")]
    assert [row["completion_mask"] for row in prepared] == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]


def test_messages_of_which_nothing_is_a_prompt_are_tokenised_as_before() -> None:
    chats = [{"messages": messages("uab", "ac")}, {"messages": messages("ud", "aef")}]
    prepared = sft_prepared(sft_trainer, chats, CharacterTokenizer(), completion_only_loss=False)
    assert [row["input_ids"] for row in prepared] == [list(b"uab\1ac\1"), list(b"ud\1aef\1")]


def prepare(dataset: Any, processing_class: Any, args: Any) -> Any:
    """Stand for TRL's method, and return the tokenizer that it is given."""
    return processing_class


def view_of(tokenizer: Any, dataset: Any = None, completion_only_loss: bool | None = None) -> Any:
    given = only_iterable(*rows()) if dataset is None else dataset
    settings = SimpleNamespace(completion_only_loss=completion_only_loss)
    return leave_the_header_to_the_prompt(Call(prepare, None, (given, tokenizer, settings)))


@pytest.mark.parametrize(
    ("dataset", "completion_only_loss"),
    [
        (only_iterable({"prompt": "a", "completion": "b"}), None),
        (only_iterable({"messages": messages("ub")}), None),
        (only_iterable({"prompt": messages("ub"), "input_ids": [1]}), None),
        (only_iterable(*rows()), False),
        (rows(), None),
    ],
    ids=["texts", "no prompt", "tokens", "all tokens are trained", "no dataset"],
)
def test_trl_has_its_own_tokenizer(dataset: Any, completion_only_loss: bool | None) -> None:
    tokenizer = CharacterTokenizer()
    assert view_of(tokenizer, dataset, completion_only_loss) is tokenizer


PROMPT, WHOLE, NOTHING = messages("ub"), messages("ub", "ac"), messages("ub", "a")
IN_TURN = ["ub\1a", "ub\1ac\1"]


def rendered(view: Any, *conversations: Any, **kwargs: Any) -> list[str]:
    return [view.apply_chat_template(each, tokenize=False, **kwargs) for each in conversations]


@pytest.mark.parametrize("completion_only_loss", [None, True])
def test_every_other_call_without_arguments_is_that_of_a_prompt(completion_only_loss: bool | None) -> None:
    view = view_of(CharacterTokenizer(), completion_only_loss=completion_only_loss)
    assert rendered(view, *[PROMPT, WHOLE] * 2) == IN_TURN * 2


def test_a_call_for_a_dict_is_that_of_a_whole_row() -> None:
    view = view_of(CharacterTokenizer())
    for _ in range(2):
        assert view.apply_chat_template(WHOLE, return_dict=True)["input_ids"] == list(b"ub\1ac\1")
    assert rendered(view, PROMPT) == IN_TURN[:1]


def test_what_the_row_says_of_the_generation_prompt_is_passed_on() -> None:
    assert rendered(view_of(CharacterTokenizer()), PROMPT, add_generation_prompt=False) == ["ub\1"]


class Failing:
    """A tokenizer that renders no message of nothing."""

    def apply_chat_template(self, turns: Any, **kwargs: Any) -> Any:
        if not turns[-1]["content"]:
            raise ValueError
        return CharacterTokenizer().apply_chat_template(turns, **kwargs)


@pytest.mark.parametrize("failing", [[NOTHING], [PROMPT, NOTHING]], ids=["a prompt", "a completion"])
def test_after_an_error_the_next_row_begins_with_its_prompt(failing: list[Any]) -> None:
    view = view_of(Failing())
    with suppress(ValueError):
        rendered(view, *failing)
    assert rendered(view, PROMPT, WHOLE) == IN_TURN


def test_the_view_of_the_tokenizer_can_be_pickled() -> None:
    view = pickle.loads(pickle.dumps(view_of(CharacterTokenizer())))
    assert type(view.__wrapped__) is CharacterTokenizer
    assert rendered(view, PROMPT, WHOLE) == IN_TURN


def test_the_key_of_the_cache_has_a_digest_of_the_code() -> None:
    _, (_, digest) = view_of(CharacterTokenizer()).__reduce_ex__(2)
    assert len(digest) == 64
