"""Texts end once if the tokenizer adds an end, and everything else is tokenized as by TRL."""

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

from trl_hotfix.patches.data import double_eos_when_tokenizer_adds_it as patch
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

ID = "double-eos-when-tokenizer-adds-it"
GIVEN, ONCE, TWICE = ["ab", "c\1", "", "d\1\1"], ["ab\1", "c\1", "\1", "d\1\1"], ["ab\1\1", "c\1\1", "\1\1", "d\1\1\1"]


def modules() -> Iterable[tuple[str, ModuleType]]:
    """Return the trainers of this release that append an end, with their modules."""
    for name in ("SFT", "Reward", "DPO", "KTO", "TPO"):
        for home in ("trl.trainer", f"trl.experimental.{name.lower()}"):
            try:
                module = import_module(f"{home}.{name.lower()}_trainer")
            except ImportError:
                continue
            prepare = getattr(getattr(module, f"{name}Trainer"), "_prepare_dataset", None)
            # A class that has moved keeps its old name.
            if prepare is None or inspect.unwrap(prepare).__module__ != module.__name__:
                continue
            if any(getattr(part, "co_name", "") == "add_eos" for part in inspect.unwrap(prepare).__code__.co_consts):
                yield name, module


TRAINERS = dict(modules())
PAIRS = [name for name in TRAINERS if name != "SFT"]
each_trainer = pytest.mark.parametrize("name", TRAINERS)
each_of_pairs = pytest.mark.parametrize(
    "name", PAIRS or [pytest.param("none", marks=pytest.mark.skip(reason="SFT alone appends an end"))]
)


class Tokenizer(CharacterTokenizer):
    """Puts ``front`` before a text and ``back`` behind it."""

    def __init__(self, front: str = "", back: str = "\1", eos_token_id: Any = 1) -> None:
        self.front, self.back, self.eos_token_id = front, back, eos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(self.front + text + self.back if add_special_tokens else text)


def rows_of(name: str, completions: Iterable[Any], prompt: Any = "u") -> list[dict[str, Any]]:
    """Return rows with these completions in the format of a trainer."""
    if name == "SFT":
        return [{"prompt": prompt, "completion": completion} for completion in completions]
    if name == "KTO":
        return [{"prompt": prompt, "completion": completion, "label": True} for completion in completions]
    columns = ("chosen", "rejected", "reference") if name == "TPO" else ("chosen", "rejected")
    return [{"prompt": prompt, **dict.fromkeys(columns, completion)} for completion in completions]


def stub(name: str, tokenizer: Any, **settings: Any) -> Any:
    module = TRAINERS[name]
    defaults = {"max_length": None, "shuffle_dataset": False}
    args = default_arguments(getattr(module, f"{name}Config"), **{**defaults, **settings})
    known = {"_tokenizer": tokenizer, "_is_vlm": False, "calculate_KL": False, "completion_only_loss": True}
    return stub_trainer(getattr(module, f"{name}Trainer"), args, chat_template=None, **known)


def prepared(
    name: str, dataset: Any, tokenizer: Any = None, trainer: Any = None, function: Any = None
) -> list[dict[str, Any]]:
    """Return the rows as the trainer prepares them."""
    tokenizer = Tokenizer() if tokenizer is None else tokenizer
    trainer = stub(name, tokenizer) if trainer is None else trainer
    options = {"packing": False, "formatting_func": function, "dataset_name": "train", "dataset": dataset}
    options |= {"processing_class": tokenizer, "args": trainer.args}
    taken = inspect.signature(trainer._prepare_dataset).parameters
    with single_process(TRAINERS[name]), recorded_warnings():
        return list(trainer._prepare_dataset(**{key: options[key] for key in options if key in taken}))


def sequences(name: str, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the texts of all sequences of each row, of prompt and completion together."""
    found = []
    for row in rows:
        names = [key for key in ("input_ids", "completion_ids", "reference_ids") if key in row]
        names += [key for key in row if key.endswith("_ids") and key.startswith(("chosen", "rejected"))]
        before = row.get("prompt_ids", [])
        found.append(["".join(map(chr, before + row[key])) for key in names])
        for mask in ("attention_mask", "completion_mask"):
            assert len(row.get(mask, row.get("input_ids", []))) == len(row.get("input_ids", []))
    return found


def expected(name: str, ends: Iterable[str], prompt: str = "u") -> list[list[str]]:
    count = {"SFT": 1, "KTO": 1, "TPO": 3}.get(name, 2)
    return [[prompt + end] * count for end in ends]


def acts(name: str, trainer: Any) -> int | None:
    return tiny.acts(ID, f"{TRAINERS[name].__name__}:{name}Trainer._prepare_dataset", trainer)


@each_trainer
def test_each_completion_ends_once(name: str) -> None:
    trainer = stub(name, Tokenizer())
    assert sequences(name, prepared(name, stream(rows_of(name, GIVEN)), trainer=trainer)) == expected(name, ONCE)
    assert acts(name, trainer) == 1


@each_trainer
def test_trl_ends_each_text_twice(name: str, switch: Any) -> None:
    with switch.off():
        texts = sequences(name, prepared(name, stream(rows_of(name, GIVEN)), Tokenizer()))
    assert all(text.endswith(ends[-2:]) for row, ends in zip(texts, TWICE, strict=True) for text in row)
    assert all(text.count("\1") > ends.count("\1") for row, ends in zip(texts, ONCE, strict=True) for text in row)


@each_of_pairs
def test_the_prompt_has_no_end(name: str) -> None:
    rows = prepared(name, stream(rows_of(name, ["", "ab"], "uv")))
    assert [row["prompt_ids"] for row in rows if "prompt_ids" in row] in ([], [[117, 118]] * 2)


def test_the_whole_completion_of_sft_is_trained_on() -> None:
    rows = prepared("SFT", stream(rows_of("SFT", ["", "ab", "c\1"], "uv")))
    # Some releases make labels here already.
    masks = [row.get("completion_mask") or [int(label != -100) for label in row["labels"]] for row in rows]
    assert masks == [[0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("column", ["text", "content"])
def test_each_text_of_sft_ends_once(column: str) -> None:
    tokenizer = Tokenizer()
    trainer = stub("SFT", tokenizer, dataset_text_field=column)
    texts = sequences("SFT", prepared("SFT", stream([{column: text} for text in GIVEN]), tokenizer, trainer))
    assert texts == [[text] for text in ONCE]
    assert acts("SFT", trainer) == 1


def test_a_text_beside_a_completion_ends_once() -> None:
    rows = prepared("SFT", stream([{"text": text, "completion": "x"} for text in GIVEN]))
    assert sequences("SFT", rows) == [[text] for text in ONCE]


def test_each_text_of_a_formatting_function_ends_once() -> None:
    dataset = stream([{"question": text} for text in GIVEN])
    trainer = stub("SFT", Tokenizer())
    rows = prepared("SFT", dataset, trainer=trainer, function=lambda row: row["question"])
    assert sequences("SFT", rows) == [[text] for text in ONCE]
    assert acts("SFT", trainer) == 1


@pytest.mark.parametrize("column", ["text", "content"])
def test_a_completion_beside_a_text_keeps_an_end(column: str) -> None:
    """TRL appends it to the text, and of this column alone."""
    tokenizer = Tokenizer()
    trainer = stub("SFT", tokenizer, dataset_text_field=column)
    rows = prepared("SFT", stream([{"prompt": "u", "completion": "ab", column: "x"}]), tokenizer, trainer)
    assert sequences("SFT", rows) == [["uab\1"]]


@each_trainer
def test_a_beginning_and_other_lists_stay_as_they_are(name: str) -> None:
    texts = sequences(name, prepared(name, stream(rows_of(name, GIVEN)), Tokenizer(front="\2")))
    assert texts == expected(name, ONCE, "\2u")


@each_trainer
def test_a_dataset_in_memory_is_prepared_so_too(name: str) -> None:
    words = ending_words()
    rows = prepared(name, Dataset.from_list(rows_of(name, [" w4", " w5 w6"], "w1")), words)
    (prompt, *ends) = [4], [7, 1], [8, 9, 1]
    ids = [row.get("prompt_ids", []) + next(row[key] for key in NAMES_OF_IDS if key in row) for row in rows]
    assert ids == [prompt + end for end in ends]


NAMES_OF_IDS = ("input_ids", "chosen_ids", "chosen_input_ids", "completion_ids")


def ending_words() -> Any:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    words.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return words


class Processor:
    """A processor has no end of its own, and is given nothing but the rows."""

    eos_token = "\1"

    def __call__(self, text: str, **kwargs: Any) -> Any:
        assert text != "a"
        return Tokenizer()(text)

    def decode(self, ids: list[int]) -> str:
        return Tokenizer().decode(ids)


UNAFFECTED: dict[str, Any] = {
    "it adds nothing": Tokenizer(back=""),
    "it begins texts so": Tokenizer(front="\1", back=""),
    "it adds another token": Tokenizer(back="\3"),
    "it is a processor": Processor(),
    "it has no end": Tokenizer(eos_token_id=None),
}


@each_trainer
@pytest.mark.parametrize("tokenizer", UNAFFECTED.values(), ids=list(UNAFFECTED))
def test_other_tokenizers_are_left_as_they_are(name: str, tokenizer: Any, switch: Any) -> None:
    trainer = stub(name, tokenizer)
    patched = prepared(name, stream(rows_of(name, GIVEN)), tokenizer, trainer)
    assert acts(name, trainer) == 0
    with switch.off():
        assert prepared(name, stream(rows_of(name, GIVEN)), tokenizer) == patched


@each_trainer
def test_messages_are_tokenized_as_by_trl(name: str, switch: Any) -> None:
    rows = rows_of(name, [messages("ax")], messages("ub"))
    if import_module("trl").__version__ == "0.24.0":
        rows = [{**row, "chat_template_kwargs": {"return_dict": False}} for row in rows]
    trainer = stub(name, Tokenizer())
    patched = prepared(name, stream(rows), trainer=trainer)
    assert acts(name, trainer) == 0
    with switch.off():
        assert prepared(name, stream(rows)) == patched


@pytest.mark.parametrize("more", [{}, {"id": "a"}])
def test_conversations_of_sft_are_tokenized_as_by_trl(more: dict[str, str], switch: Any) -> None:
    rows = [{"messages": messages("ub", "ax"), **more}]
    trainer = stub("SFT", Tokenizer())
    patched = prepared("SFT", stream(rows), trainer=trainer)
    assert acts("SFT", trainer) == 0
    with switch.off():
        assert prepared("SFT", stream(rows)) == patched


@pytest.mark.parametrize("more", [{}, {"text": "ab"}])
def test_tokens_of_sft_are_left_alone(more: dict[str, str]) -> None:
    trainer = stub("SFT", Tokenizer())
    (row,) = prepared("SFT", stream([{"input_ids": [97, 1, 1], **more}]), trainer=trainer)
    assert row["input_ids"] == [97, 1, 1]
    assert acts("SFT", trainer) == 0


def test_tokens_of_the_reward_trainer_are_left_alone() -> None:
    if "Reward" not in TRAINERS:
        pytest.skip("RewardTrainer of this release appends no end")
    names = ("chosen_ids", "rejected_ids", "chosen_input_ids", "rejected_input_ids")
    trainer = stub("Reward", Tokenizer())
    (row,) = prepared("Reward", stream([{column: [97, 1, 1] for column in names}]), trainer=trainer)
    assert all(row[key] == [97, 1, 1] for key in names if key in row)
    assert acts("Reward", trainer) == 0


@each_trainer
def test_an_empty_dataset_is_trls(name: str) -> None:
    """TRL asks for the first row itself."""
    trainer = stub(name, Tokenizer())
    with pytest.raises((StopIteration, RuntimeError)):
        prepared(name, Dataset.from_dict({column: [] for column in rows_of(name, ["a"])[0]}), trainer=trainer)
    assert not acts(name, trainer)


@each_trainer
def test_the_users_tokenizer_stays_as_it_is(name: str) -> None:
    tokenizer = Tokenizer()
    prepared(name, stream(rows_of(name, GIVEN)), tokenizer)
    assert tokenizer("a\1")["input_ids"] == [97, 1, 1]


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
@pytest.mark.parametrize(("view", "ends"), [(Seen, 1), (Users, 2)])
def test_a_view_of_another_patch_sees_the_ids_of_trl_and_one_of_the_users_its_own(
    name: str, view: Any, ends: int
) -> None:
    SEEN.clear()
    trainer = stub(name, Tokenizer())
    rows = prepared(name, stream(rows_of(name, GIVEN[:1])), view(Tokenizer()), trainer)
    assert sequences(name, rows) == expected(name, ONCE[:1])
    assert max(ids.count(1) for ids in SEEN) == ends
    assert acts(name, trainer) == 1


@pytest.mark.parametrize(("prompts", "of_a_text"), [(True, [4]), (False, [4, 1])])
def test_the_view_can_be_pickled_and_copied(prompts: bool, of_a_text: list[int]) -> None:
    view = patch._ending_once(ending_words(), prompts)
    for another in (view, pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert another("w1 <eos>")["input_ids"] == [4, 1]
        assert another("w1 <eos>")["attention_mask"] == [1, 1]
        assert another("w1")["input_ids"] == of_a_text
        assert another("w1", add_special_tokens=False)["input_ids"] == [4]


def test_the_key_of_the_cache_changes_with_the_view() -> None:
    from datasets.fingerprint import Hasher

    words = ending_words()
    keys = {Hasher.hash(patch._ending_once(words, prompts)) for prompts in (True, False)}
    assert len(keys | {Hasher.hash(words)}) == 3
    assert keys == {Hasher.hash(patch._ending_once(words, prompts)) for prompts in (True, False)}


@each_trainer
def test_trl_maps_with_its_own_tokenizer_if_it_adds_no_end(name: str, handed_on: list[Any]) -> None:
    tokenizer = Tokenizer(back="")
    prepared(name, stream(rows_of(name, ["ab"])), tokenizer)
    assert handed_on
    assert all(words is tokenizer for words in handed_on)
