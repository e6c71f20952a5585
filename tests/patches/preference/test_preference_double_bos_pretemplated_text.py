"""Texts that have a beginning keep that one alone, and everything else is tokenized as by TRL."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import wrapt
from datasets import Dataset

from trl_hotfix.authoring import beginning_once
from trl_hotfix.testing import (
    CharacterTokenizer,
    default_arguments,
    messages,
    recorded_warnings,
    single_process,
    stream,
    stub_trainer,
)

import tiny

ID = "preference-double-bos-pretemplated-text"
GIVEN, ONCE, TWICE = ["\2ab", "c", "\2", "\2\2d", ""], ["\2ab", "\2c", "\2", "\2\2d", "\2"], ["\2\2ab", "\2c"]

Texts = list[dict[str, str]]


def modules() -> Iterable[tuple[str, ModuleType]]:
    """Return the trainers of this release that leave the special tokens to the tokenizer, with their modules."""
    for name in ("Reward", "DPO", "KTO", "TPO"):
        for home in ("trl.trainer", f"trl.experimental.{name.lower()}"):
            try:
                module = import_module(f"{home}.{name.lower()}_trainer")
            except ImportError:
                continue
            trainer_class = getattr(module, f"{name}Trainer")
            prepare = getattr(trainer_class, "_prepare_dataset", None)
            # A class that has moved keeps its old name.
            is_its_own = prepare is not None and inspect.unwrap(prepare).__module__ == module.__name__
            if is_its_own and not hasattr(trainer_class, "tokenize_row"):
                yield name, module


TRAINERS = dict(modules())
each_trainer = pytest.mark.parametrize("name", TRAINERS)


class Tokenizer(CharacterTokenizer):
    """Puts ``front`` before a text and ``back`` behind it, and counts what it is asked for."""

    def __init__(self, front: str = "\2", back: str = "", bos_token_id: Any = 2) -> None:
        self.front, self.back, self.bos_token_id = front, back, bos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(self.front + text + self.back if add_special_tokens else text)

    def render(self, messages: Any, *, add_generation_prompt: bool) -> str:
        return "\2" + super().render(messages, add_generation_prompt=add_generation_prompt)


def rows_of(name: str, prompts: Iterable[Any], ends: Any = ("x", "y", "z")) -> list[dict[str, Any]]:
    """Return rows of these prompts in the format of a trainer."""
    chosen, rejected, reference = ends
    if name == "KTO":
        return [{"prompt": prompt, "completion": chosen, "label": True} for prompt in prompts]
    answers = {"chosen": chosen, "rejected": rejected} | ({"reference": reference} if name == "TPO" else {})
    return [{"prompt": prompt, **answers} for prompt in prompts]


def stub(name: str, tokenizer: Any) -> Any:
    module = TRAINERS[name]
    args = default_arguments(getattr(module, f"{name}Config"), max_length=None)
    known = {"_tokenizer": tokenizer, "_is_vlm": False, "calculate_KL": False}
    return stub_trainer(getattr(module, f"{name}Trainer"), args, **known)


def prepared(name: str, dataset: Any, tokenizer: Any = None, trainer: Any = None) -> Texts:
    """Return the texts of the ids of each row, without the end of sequence that TRL adds."""
    tokenizer = Tokenizer() if tokenizer is None else tokenizer
    trainer = stub(name, tokenizer) if trainer is None else trainer
    with single_process(TRAINERS[name]), recorded_warnings():
        rows = list(trainer._prepare_dataset(dataset, tokenizer, trainer.args, "train"))
    texts = [
        {key: "".join(map(chr, row[key])).removesuffix("\1") for key in row if key.endswith("_ids")} for row in rows
    ]
    assert all(texts)
    return texts


def expected(name: str, beginnings: Iterable[str]) -> Texts:
    """Return the texts of rows of these prompts."""
    if name == "Reward":
        legacy = "chosen_input_ids" in prepared(name, stream(rows_of(name, ["a"])))[0]
        keys = {side: f"{side}_input_ids" if legacy else f"{side}_ids" for side in ("chosen", "rejected")}
        return [{keys["chosen"]: f"{text}x", keys["rejected"]: f"{text}y"} for text in beginnings]
    if name == "KTO":
        return [{"prompt_ids": text, "completion_ids": "x"} for text in beginnings]
    answers = {"chosen_ids": "x", "rejected_ids": "y"} | ({"reference_ids": "z"} if name == "TPO" else {})
    return [{"prompt_ids": text, **answers} for text in beginnings]


def acts(name: str, trainer: Any) -> int | None:
    return tiny.acts(ID, f"{TRAINERS[name].__name__}:{name}Trainer._prepare_dataset", trainer)


@each_trainer
def test_each_text_begins_once(name: str) -> None:
    trainer = stub(name, Tokenizer())
    assert prepared(name, stream(rows_of(name, GIVEN)), trainer=trainer) == expected(name, ONCE)
    assert acts(name, trainer) == 1


@each_trainer
def test_trl_puts_a_beginning_before_each_text(name: str, switch: Any) -> None:
    with switch.off():
        assert prepared(name, stream(rows_of(name, GIVEN[:2]))) == expected(name, TWICE)


@each_trainer
def test_a_dataset_in_memory_is_prepared_so_too(name: str) -> None:
    words = beginning_words()
    rows = rows_of(name, ["w59 w1", "w2 w3"], ("w4 <eos>", "w5 <eos>", "w6 <eos>"))
    trainer = stub(name, words)
    dataset = Dataset.from_list([{key: f"{row[key]} " if key == "prompt" else row[key] for key in row} for row in rows])
    with single_process(TRAINERS[name]):
        once = [row[first_ids(row)] for row in trainer._prepare_dataset(dataset, words, trainer.args, "train")]
    assert [ids[:3] for ids in once] == ([[62, 4, 7], [62, 5, 6]] if name == "Reward" else [[62, 4], [62, 5, 6]])


def beginning_words() -> Any:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.bos_token = "w59"
    words.backend_tokenizer.post_processor = TemplateProcessing(single="w59 $A", special_tokens=[("w59", 62)])
    return words


def first_ids(row: dict[str, Any]) -> str:
    return next(name for name in ("prompt_ids", "chosen_ids", "chosen_input_ids") if name in row)


@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "KTO"])
def test_the_prompt_may_be_the_beginning_of_both_answers(name: str) -> None:
    rows = rows_of(name, [""], ("\2ax", "\2ay", "\2az"))
    del rows[0]["prompt"]
    assert prepared(name, stream(rows)) == expected(name, ["\2a"])


def test_pairs_of_kto_begin_once() -> None:
    if "KTO" not in TRAINERS:
        pytest.skip("KTO of this release adds no second beginning")
    rows = [{"prompt": "\2a", "chosen": "x", "rejected": "y"}]
    texts = prepared("KTO", stream(rows))
    assert [text["prompt_ids"] + text["completion_ids"] for text in texts] == ["\2ax", "\2ay"]


class Processor:
    """A processor has no beginning of its own."""

    eos_token = "\1"

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return Tokenizer()(text)


UNAFFECTED: dict[str, tuple[Any, list[Any]]] = {
    "another text comes first": (Tokenizer(), ["ab", "\2\2ab"]),
    "no text has a beginning": (Tokenizer(), ["ab", "c"]),
    "no text at all": (Tokenizer(), ["", ""]),
    "it adds nothing": (Tokenizer(front=""), ["\2\2ab", "\2a"]),
    "it ends texts so": (Tokenizer(front="", back="\2"), ["\2ab"]),
    "it adds another token": (Tokenizer(front="\3"), ["\2ab", "\2\2a"]),
    "it is a processor": (Processor(), ["\2ab"]),
    "it has no beginning": (Tokenizer(bos_token_id=None), ["\2ab"]),
}


@each_trainer
@pytest.mark.parametrize(("tokenizer", "prompts"), UNAFFECTED.values(), ids=list(UNAFFECTED))
def test_other_texts_are_tokenized_as_by_trl(name: str, tokenizer: Any, prompts: Any, switch: Any) -> None:
    trainer = stub(name, tokenizer)
    patched = prepared(name, stream(rows_of(name, prompts)), tokenizer, trainer)
    assert acts(name, trainer) == 0
    with switch.off():
        assert prepared(name, stream(rows_of(name, prompts)), tokenizer) == patched


@each_trainer
def test_messages_are_tokenized_as_by_trl(name: str, switch: Any) -> None:
    ends = [messages(text) for text in ("ax", "ay", "az")]
    rows = [{**row, "chat_template_kwargs": {"return_dict": False}} for row in rows_of(name, [messages("ub")], ends)]
    if name != "Reward" or import_module("trl").__version__ != "0.24.0":
        rows = [{key: row[key] for key in row if key != "chat_template_kwargs"} for row in rows]
    trainer = stub(name, Tokenizer())
    patched = prepared(name, stream(rows), trainer=trainer)
    assert acts(name, trainer) == 0
    with switch.off():
        assert prepared(name, stream(rows)) == patched


def test_tokens_of_the_reward_trainer_are_left_alone() -> None:
    names = ("chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids")
    rows = [{column: [2, 2, 97] for column in names}]
    trainer = stub("Reward", Tokenizer())
    assert set(prepared("Reward", stream(rows), trainer=trainer)[0].values()) == {"\2\2a"}
    assert acts("Reward", trainer) == 0


@each_trainer
def test_an_empty_dataset_is_trls(name: str) -> None:
    """TRL asks for the first row itself."""
    with pytest.raises((StopIteration, RuntimeError)):
        prepared(name, Dataset.from_dict({column: [] for column in rows_of(name, ["a"])[0]}))


@each_trainer
def test_the_users_tokenizer_stays_as_it_is(name: str) -> None:
    tokenizer = Tokenizer()
    prepared(name, stream(rows_of(name, GIVEN)), tokenizer)
    assert tokenizer("\2a")["input_ids"] == [2, 2, 97]


SEEN: list[list[int]] = []


class Seen(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
    """A view of a tokenizer, of another patch. It notes the ids that it sees in ``SEEN``."""

    __module__ = "trl_hotfix.patches.data.another"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoded = self.__wrapped__(*args, **kwargs)
        SEEN.append(list(encoded["input_ids"]))
        return encoded


class Users(Seen):
    """A view of the user's."""

    __module__ = "users"


@each_trainer
@pytest.mark.parametrize(("view", "ids"), [(Seen, "\2ab"), (Users, "\2\2ab")])
def test_a_view_of_another_patch_sees_the_ids_of_trl_and_one_of_the_users_its_own(
    name: str, view: Any, ids: str
) -> None:
    SEEN.clear()
    trainer = stub(name, Tokenizer())
    texts = prepared(name, stream(rows_of(name, GIVEN[:1])), view(Tokenizer()), trainer)
    assert texts == expected(name, ONCE[:1])
    assert {"".join(map(chr, found))[: len(ids)] for found in SEEN} == {ids}
    assert acts(name, trainer) == 1


def test_the_view_can_be_pickled_and_copied() -> None:
    view = beginning_once(beginning_words())
    for another in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert another("w59 w1")["input_ids"] == [62, 4]
        assert another("w59 w1")["attention_mask"] == [1, 1]
        assert another("w1")["input_ids"] == [62, 4]


def test_the_key_of_the_cache_changes_with_the_view() -> None:
    from datasets.fingerprint import Hasher

    words = beginning_words()
    assert Hasher.hash(beginning_once(words)) != Hasher.hash(words)
    assert Hasher.hash(beginning_once(words)) == Hasher.hash(beginning_once(words))


@each_trainer
def test_trl_maps_with_its_own_tokenizer_if_no_text_begins_twice(name: str, handed_on: list[Any]) -> None:
    tokenizer = Tokenizer()
    prepared(name, stream(rows_of(name, ["ab"])), tokenizer)
    assert handed_on
    assert all(words is tokenizer for words in handed_on)
