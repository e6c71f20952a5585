"""Texts and conversations begin once, in every column and format. TRL tokenizes all others as before."""

from __future__ import annotations

import hashlib
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import wrapt
from datasets import Dataset
from datasets.fingerprint import Hasher
from packaging.version import Version
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.patches.sft import sft_double_bos_pretemplated_text
from trl_hotfix.testing import (
    CharacterTokenizer,
    default_arguments,
    messages,
    sft_prepared,
    single_process,
    stub_trainer,
)

import tiny

GIVEN = ["\2ab", "c", "\2d", "\2\2e", "f\2"]
ONCE = ["\2ab", "\2c", "\2d", "\2\2e", "\2f\2"]
TWICE = ["\2\2ab", "\2c", "\2\2d", "\2\2\2e", "\2f\2"]

RENDERS_TEXTS = Version(version("trl")) < Version("0.17.0")
"""Whether TRL tokenizes the texts that it renders from conversations as any text."""


class Tokenizer(CharacterTokenizer):
    """Puts ``front`` before a text and ``back`` behind it. The chat template begins with the character 2."""

    bos_token: Any = "\2"
    bos_token_id: Any = 2

    def __init__(self, front: str = "\2", back: str = "") -> None:
        self.front, self.back = front, back

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(self.front + text + self.back if add_special_tokens else text)

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return "\2" + super().render(messages, add_generation_prompt=add_generation_prompt)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        encoded = self(text, add_special_tokens=False)
        return text if not tokenize else encoded if return_dict else encoded["input_ids"]


class Processor:
    """A processor has a tokenizer, and no beginning of its own."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return self.tokenizer(text, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "bos_token_id":
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def texts(rows: list[dict[str, Any]], tokenizer: Any = None, function: Any = None, **settings: Any) -> list[str]:
    """Return what is tokenized of each row, without the end of sequence."""
    settings = {"completion_only_loss": False, **settings}
    prepared = sft_prepared(sft_trainer, rows, Tokenizer() if tokenizer is None else tokenizer, function, **settings)
    for row in prepared:
        columns = ("input_ids", "attention_mask", "completion_mask", "labels")
        assert len({len(row[name]) for name in columns if name in row}) == 1, row
    return ["".join(map(chr, row["input_ids"])).removesuffix("\1") for row in prepared]


def of_column(name: str) -> list[dict[str, Any]]:
    return [{name: text} for text in GIVEN]


def of_format(kind: str) -> list[str]:
    """Return what is tokenized of the texts that stand in the rows in this way."""
    if kind == "content":
        return texts(of_column("content"), dataset_text_field="content")
    if kind == "formatted":
        return texts(of_column("question"), function=lambda row: row["question"])
    if kind == "pairs":
        pairs = texts([{"prompt": text, "completion": "z"} for text in GIVEN])
        assert all(text.endswith("z") for text in pairs)
        return [text.removesuffix("z") for text in pairs]
    return texts(of_column("text"))


FORMATS = ("text", "content", "formatted", "pairs")


@pytest.mark.parametrize("kind", FORMATS)
def test_each_text_begins_once(kind: str) -> None:
    assert of_format(kind) == ONCE


@pytest.mark.parametrize("kind", FORMATS)
def test_trl_puts_a_beginning_before_each_text(kind: str, switch: Any) -> None:
    with switch.off():
        assert of_format(kind) == TWICE


TURNS = messages("uab", "ac")
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "prompt and completion": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "older": {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in TURNS]},
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversations_begin_once(kind: str, switch: Any) -> None:
    if kind == "older" and not hasattr(sft_trainer, "maybe_convert_to_chatml"):
        pytest.skip("this release takes no conversations of the older form")
    rows = [CONVERSATIONS[kind]]
    assert texts(rows) == ["\2uab\1ac"]
    with switch.off():
        assert texts(rows) == ["\2\2uab\1ac" if RENDERS_TEXTS else "\2uab\1ac"]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_trl_has_its_tokenizer_where_it_renders_to_tokens(kind: str, handed_on: list[Any]) -> None:
    if RENDERS_TEXTS:
        pytest.skip("this release tokenizes the texts that it has rendered")
    tokenizer = Tokenizer()
    texts([CONVERSATIONS[kind]], tokenizer)
    assert handed_on
    assert all(words is tokenizer for words in handed_on)


@pytest.mark.parametrize("rest", [{"prompt": "a"}, {"completion": "a"}], ids=["a prompt", "a completion"])
def test_a_text_counts_beside_a_prompt_or_a_completion_alone(rest: dict[str, Any]) -> None:
    if "prompt" in rest and not RENDERS_TEXTS:
        pytest.skip("in this release a prompt must have a completion")
    assert texts([{**rest, "text": "\2ab"}]) == ["\2ab"]


BEGUN: dict[str, Any] = {"text": "\2\2ab"}
TOKENS: dict[str, Any] = {"text": "\2ab", "input_ids": [2, 2, 97]}


@pytest.mark.parametrize(
    ("tokenizer", "rows", "function"),
    [
        (Tokenizer(), [{"text": "ab"}, BEGUN], None),
        (Tokenizer(), [{"prompt": start, "completion": "b", "text": "\2ab"} for start in ("a", "\2a")], None),
        (Tokenizer(), [TOKENS], None),
        (Tokenizer(), [TOKENS], lambda row: "\2ab"),
        (Tokenizer(front=""), [BEGUN], None),
        (Tokenizer(front="", back="\2"), [BEGUN], None),
        (CharacterTokenizer(), [BEGUN], None),
        (Processor(), [BEGUN], None),
    ],
    ids=[
        "another text comes first",
        "the prompt is another",
        "tokens",
        "tokens and a function",
        "it adds nothing",
        "it ends texts so",
        "it has no beginning",
        "a processor",
    ],
)
def test_trl_has_its_tokenizer_where_the_first_text_does_not_begin_twice(
    tokenizer: Any, rows: list[dict[str, Any]], function: Any, switch: Any, handed_on: list[Any]
) -> None:
    patched = texts(rows, tokenizer, function)
    assert all(words is tokenizer for words in handed_on)
    with switch.off():
        assert patched == texts(rows, tokenizer, function)


def test_a_formatting_function_has_texts_that_begin_once_whatever_the_first_is() -> None:
    assert texts([{"question": "ab"}, {"question": "\2c"}], function=lambda row: row["question"]) == ["\2ab", "\2c"]


def test_rows_without_a_text_are_trls_error(switch: Any) -> None:
    with pytest.raises(KeyError, match="text"):
        texts([{"content": "ab"}])
    with switch.off(), pytest.raises(KeyError, match="text"):
        texts([{"content": "ab"}])


class Rows(list[Any]):
    """Rows that are no dataset. They count how often they are read."""

    reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return super().__iter__()


def reads() -> int:
    """Return how often such rows are read until TRL refuses them."""
    args, rows = default_arguments(sft_trainer.SFTConfig), Rows([BEGUN])
    trainer = stub_trainer(sft_trainer.SFTTrainer, args)
    with single_process(sft_trainer), pytest.raises(AttributeError):
        trainer._prepare_dataset(rows, Tokenizer(), args, False, None, "train")
    return rows.reads


def test_what_is_no_dataset_is_read_by_trl_alone(switch: Any) -> None:
    patched = reads()
    with switch.off():
        assert patched == reads()


def test_the_users_tokenizer_stays_as_it_is() -> None:
    tokenizer = Tokenizer()
    texts([BEGUN], tokenizer)
    assert type(tokenizer) is Tokenizer
    assert tokenizer("\2a")["input_ids"] == [2, 2, 97]


SEEN: list[list[int]] = []


def seen(tokenizer: Any, name: str) -> Any:
    assert type(name) is str
    return Seen(tokenizer)


class Seen(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
    """A view of a tokenizer, of another patch. It notes the ids that it sees in ``SEEN``."""

    __module__ = "trl_hotfix.patches.sft.another"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return seen, (self.__wrapped__, "another argument")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoded = self.__wrapped__(*args, **kwargs)
        SEEN.append(list(encoded["input_ids"]))
        return encoded


class Users(Seen):
    """A view of the user's, which cannot be pickled."""

    __module__ = "users"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("view", "ids"), [(Seen, "\2ab"), (Users, "\2\2ab")])
def test_a_view_of_another_patch_sees_the_ids_of_trl_and_one_of_the_users_its_own(view: Any, ids: str) -> None:
    SEEN.clear()
    assert texts([{"text": "\2ab"}], view(Tokenizer())) == ["\2ab"]
    assert {"".join(map(chr, found)).removesuffix("\1") for found in SEEN} == {ids}


def test_the_view_of_the_tokenizer_can_be_pickled(handed_on: list[Any]) -> None:
    texts([{"text": "\2ab"}])
    assert pickle.loads(pickle.dumps(handed_on[-1]))("\2a")["input_ids"] == [2, 97]


def test_the_key_of_the_cache_changes_with_the_view_and_with_its_code(handed_on: list[Any]) -> None:
    tokenizer = Tokenizer()
    texts([{"text": "\2ab"}], tokenizer)
    assert Hasher.hash(handed_on[-1]) != Hasher.hash(tokenizer)
    code = Path(sft_double_bos_pretemplated_text.__file__).read_bytes()
    assert hashlib.sha256(code).hexdigest().encode() in pickle.dumps(handed_on[-1])


def test_a_trainer_trains_and_evaluates_on_texts_that_begin_once(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.bos_token = "w59"
    words.backend_tokenizer.post_processor = TemplateProcessing(single="w59 $A", special_tokens=[("w59", 62)])
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, dataset_text_field="text"),
        train_dataset=Dataset.from_list([{"text": "w59 w1 w2 <eos>"}, {"text": "w59 w3 <eos>"}]),
        eval_dataset=Dataset.from_list([{"text": "w59 w4 <eos>"}]),
        tokenizer=words,
    )
    assert [row["input_ids"] for row in trainer.train_dataset] == [[62, 4, 5, 1], [62, 6, 1]]
    assert [row["input_ids"] for row in trainer.eval_dataset] == [[62, 7, 1]]
