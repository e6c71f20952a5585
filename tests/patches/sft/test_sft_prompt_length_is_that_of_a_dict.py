"""Prompts that are messages are not trained on, however long they are. TRL has its own tokenizer for all else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Encoding
from transformers import BatchEncoding
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.testing import (
    CharacterTokenizer,
    default_arguments,
    messages,
    prepared_completions,
    sft_prepared,
    single_process,
    stream,
    stub_trainer,
)

import tiny

ID, TARGET = "sft-prompt-length-is-that-of-a-dict", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

PAIRS = (
    (("uab",), ("acd",)),
    (("sx", "uabc"), ("ad",)),
    (("uab", "acd", "ue"), ("af", "ug", "ahi")),
    (("ub",), ("acdef",)),
)
"""Prompts and completions."""
LENGTHS = [sum(len(turn) + 1 for turn in prompt) for prompt, _ in PAIRS]
MESSAGES = [{"prompt": messages(*prompt), "completion": messages(*answer)} for prompt, answer in PAIRS]


class Tokenizer(CharacterTokenizer):
    """It renders a conversation as a dict unless it is told not to, as the fast ones of transformers 5 do.

    TRL asks for the first entry, which is an encoding of ``tokenizers``.
    """

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return BatchEncoding(dict(super().__call__(text)), Encoding())

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        # Nothing begins an answer: before 0.24.0 a beginning is none of the prompt's, which is another bug.
        return super().render(messages, add_generation_prompt=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        return_dict: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        return super().apply_chat_template(messages, tokenize, return_dict, add_generation_prompt, **kwargs)


def lengths_of_prompts() -> list[int]:
    """Return how many tokens two trainers leave out of the loss of each row, all of which come first."""
    prepared = prepared_completions(sft_trainer, PAIRS, Tokenizer())
    assert all(trained == sorted(trained) for _, trained in prepared)
    return [trained.count(False) for _, trained in prepared]


def test_each_prompt_of_each_trainer_is_left_out_of_the_loss() -> None:
    assert lengths_of_prompts() == 2 * LENGTHS


def test_trl_leaves_two_tokens_out(switch: Any) -> None:
    with switch.off():
        assert lengths_of_prompts() == [2] * 2 * len(LENGTHS)


@pytest.mark.parametrize("chosen", [None, True])
@pytest.mark.parametrize("name", ["train", "eval"])
def test_the_loss_of_the_completions_is_the_default_and_may_be_chosen(chosen: bool | None, name: str) -> None:
    tokenizer, settings = Tokenizer(), {"completion_only_loss": chosen, "max_length": None, "shuffle_dataset": False}
    args = default_arguments(sft_trainer.SFTConfig, **settings)
    known = {"completion_only_loss": True, "_is_vlm": False, "_tokenizer": tokenizer, "chat_template": None}
    trainer = stub_trainer(sft_trainer.SFTTrainer, args, **known)
    with single_process(sft_trainer):
        prepared = trainer._prepare_dataset(stream(MESSAGES), tokenizer, args, False, None, name)
    assert [row["completion_mask"].count(0) for row in prepared] == LENGTHS
    assert tiny.acts(ID, TARGET, trainer) == 1


@pytest.mark.parametrize(
    ("row", "completion_only_loss"),
    [
        ({"prompt": "a", "completion": "b"}, True),
        ({"messages": messages("ua", "ab")}, True),
        ({"text": "ab"}, True),
        ({"input_ids": [5, 6, 7], "prompt": messages("ua")}, True),
        (MESSAGES[0], False),
    ],
    ids=["a prompt of text", "messages", "text", "tokens", "prompts are trained on"],
)
def test_trl_has_its_tokenizer_where_no_prompt_of_messages_is_left_out(
    row: dict[str, Any], completion_only_loss: bool, handed_on: list[Any], switch: Any
) -> None:
    tokenizer = Tokenizer()
    patched = sft_prepared(sft_trainer, [row], tokenizer, completion_only_loss=completion_only_loss)
    assert all(words is tokenizer for words in handed_on)
    with switch.off():
        assert patched == sft_prepared(sft_trainer, [row], tokenizer, completion_only_loss=completion_only_loss)


@pytest.fixture
def view(handed_on: list[Any]) -> Any:
    """Return what TRL gets for a tokenizer."""
    sft_prepared(sft_trainer, MESSAGES[:1], Tokenizer(), completion_only_loss=True)
    return handed_on[-1]


PROMPT, IDS = messages("ub"), [*map(ord, "ub\1")]


def test_the_view_renders_a_list_if_it_is_not_told_otherwise(view: Any) -> None:
    assert view.apply_chat_template(PROMPT) == IDS
    assert view.apply_chat_template(PROMPT, tokenize=True) == IDS


def test_the_view_renders_a_dict_for_those_who_ask_for_one(view: Any) -> None:
    assert view.apply_chat_template(PROMPT, return_dict=True)["input_ids"] == IDS


def test_the_view_renders_texts_and_tokenizes_as_the_tokenizer(view: Any) -> None:
    assert view.apply_chat_template(PROMPT, tokenize=False) == "ub\1"
    assert view("ub\1")["input_ids"] == IDS


def test_the_view_renders_a_list_in_another_process_too(view: Any) -> None:
    again = pickle.loads(pickle.dumps(view))
    assert again.apply_chat_template(PROMPT) == IDS
    assert type(again.__wrapped__) is Tokenizer


def test_the_key_of_the_cache_changes_with_the_code_of_the_view(view: Any) -> None:
    _, (tokenizer, digest) = view.__reduce_ex__(2)
    assert tokenizer is view.__wrapped__
    assert len(digest) == 64


def test_the_users_tokenizer_stays_as_it_is(view: Any) -> None:
    assert view.__wrapped__.apply_chat_template(PROMPT)["input_ids"] == IDS


def test_a_trainer_trains_and_evaluates_on_completions_alone(tmp_path: Path) -> None:
    words = tiny.chat_tokenizer(
        "{% for message in messages %}"
        "{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} <eos> {% endfor %}"
    )
    rows = [
        {"prompt": messages("uw1 w2"), "completion": messages("aw3")},
        {"prompt": messages("uw1", "aw2", "uw3"), "completion": messages("aw4 w5")},
    ]
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[1:]),
        tokenizer=words,
    )
    assert [row["completion_mask"] for row in trainer.train_dataset] == [[0] * 4 + [1] * 3, [0] * 9 + [1] * 4]
    assert [row["completion_mask"] for row in trainer.eval_dataset] == [[0] * 9 + [1] * 4]
