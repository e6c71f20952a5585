"""The chat template is given the roles that it knows, and datasets without ShareGPT's roles are TRL's own."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl.trainer import sft_trainer

from trl_hotfix.call import Call
from trl_hotfix.patches.data.sharegpt_roles_not_mapped import name_the_roles
from trl_hotfix.testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer

import tiny

ID, TARGET = "sharegpt-roles-not-mapped", "trl.trainer.sft_trainer:SFTTrainer._prepare_dataset"

Row = dict[str, Any]

each_kind = pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["dataset", "stream"])


def turns(*each: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in each]


ASKED = turns(("human", "ab"), ("gpt", "c"))
RENAMED = turns(("user", "ab"), ("assistant", "c"))
CONVERSATIONS = (
    ASKED,
    turns(("system", "d"), ("human", "e"), ("gpt", "fg"), ("human", "h"), ("gpt", "i")),
    turns(("user", "j"), ("gpt", "k"), ("tool", "l")),
)
TEXTS = ("uab\1ac\1", "sd\1ue\1afg\1uh\1ai\1", "uj\1ak\1tl\1")
"""The template writes the first letter of a role."""
OF_TRL = ("hab\1gc\1", "sd\1he\1gfg\1hh\1gi\1", "uj\1gk\1tl\1")


class Prepared:
    """The rows of a dataset that TRL has prepared."""

    def __init__(
        self,
        rows: Any,
        tokenizer: Any = None,
        *,
        make: Any = Dataset.from_list,
        function: Any = None,
        name: str = "train",
        **settings: Any,
    ) -> None:
        args = default_arguments(
            sft_trainer.SFTConfig, **{"max_length": None, "max_seq_length": None, "shuffle_dataset": False, **settings}
        )
        tokenizer = tokenizer or CharacterTokenizer()
        attributes: dict[str, Any] = {"chat_template": None, "_is_vlm": False, "_tokenizer": tokenizer}
        trainer = stub_trainer(sft_trainer.SFTTrainer, args, completion_only_loss=False, **attributes)
        self.dataset = make(rows)
        with single_process(sft_trainer):
            self.rows = list(trainer._prepare_dataset(self.dataset, tokenizer, args, False, function, name))
        self.acts = tiny.acts(ID, TARGET, trainer)

    @property
    def texts(self) -> list[str]:
        return ["".join(map(chr, row["input_ids"])) for row in self.rows]


def conversations(*each: list[dict[str, str]]) -> list[Row]:
    return [{"conversations": messages, "number": number} for number, messages in enumerate(each)]


@each_kind
@pytest.mark.parametrize("step", [1, -1], ids=["forwards", "backwards"])
def test_the_template_is_given_the_roles_that_it_knows(make: Any, step: int) -> None:
    prepared = Prepared(conversations(*CONVERSATIONS[::step]), make=make)
    assert prepared.texts == list(TEXTS[::step])
    assert prepared.acts == 1


@each_kind
def test_trl_keeps_the_roles(make: Any, switch: Any) -> None:
    with switch.off():
        assert Prepared(conversations(*CONVERSATIONS), make=make).texts == list(OF_TRL)


@each_kind
def test_the_rows_are_those_of_conversations_with_the_roles_of_trl(make: Any, switch: Any) -> None:
    rows = Prepared(conversations(ASKED, ASKED), make=make).rows
    with switch.off():
        assert Prepared(conversations(RENAMED, RENAMED), make=make).rows == rows


def test_the_dataset_of_the_user_keeps_its_roles() -> None:
    dataset = Prepared(conversations(ASKED)).dataset
    assert dataset["conversations"][0] == ASKED


def test_the_evaluation_data_are_prepared_alike() -> None:
    assert Prepared(conversations(ASKED), name="eval").texts == [TEXTS[0]]


def test_each_trainer_has_its_own_data() -> None:
    for _ in range(2):
        assert Prepared(conversations(ASKED)).texts == [TEXTS[0]]
        prepared = Prepared(conversations(RENAMED))
        assert (prepared.texts, prepared.acts) == ([TEXTS[0]], 0)


@each_kind
def test_prompts_and_completions_beside_conversations_have_the_roles_too(make: Any) -> None:
    if "concat_prompt_completion" in inspect.unwrap(sft_trainer.SFTTrainer._prepare_dataset).__code__.co_varnames:
        pytest.skip("this release makes one text of a prompt and its completion before it converts them")
    if hasattr(sft_trainer, "apply_chat_template"):
        pytest.skip("this release refuses messages beside a prompt and its completion")
    first = {"conversations": ASKED, "prompt": ASKED[:1], "completion": ASKED[1:]}
    second = {"conversations": ASKED, "prompt": RENAMED[:1], "completion": ASKED[1:]}
    assert Prepared([first, second], make=make).texts == [TEXTS[0]] * 2


class Tokenizer(CharacterTokenizer):
    """A tokenizer, or a processor with one, whose chat template is asked for its words only."""

    def __init__(self, chat_template: Any = None, of_tokenizer: Any = None) -> None:
        self.chat_template: Any = chat_template
        if of_tokenizer is not None:
            self.tokenizer = SimpleNamespace(chat_template=of_tokenizer)


@pytest.mark.parametrize(
    "tokenizer",
    [
        Tokenizer("{% if message['role'] == 'human' %}"),
        Tokenizer('{{ "gpt" }}'),
        Tokenizer(of_tokenizer={"default": "['gpt']"}),
    ],
    ids=["both", "one", "a processor"],
)
def test_a_template_that_asks_for_the_roles_is_given_them(tokenizer: Any) -> None:
    prepared = Prepared(conversations(ASKED), tokenizer)
    assert (prepared.texts, prepared.acts) == ([OF_TRL[0]], 0)


@pytest.mark.parametrize("template", ["a human's gpt: 'human\"", "'humans' \"gpt-4\"", "human gpt"])
def test_a_template_that_only_has_the_words_in_it_is_given_the_other_roles(template: str) -> None:
    assert Prepared(conversations(ASKED), Tokenizer(template)).texts == [TEXTS[0]]


def asked_in_text(row: Row) -> str:
    return str(row["conversations"][0]["from"])


@pytest.mark.parametrize(
    ("rows", "function"),
    [
        (conversations(RENAMED), None),
        (conversations(RENAMED, ASKED), None),
        ([{"messages": [{"role": "human", "content": "ab"}, {"role": "gpt", "content": "c"}]}], None),
        ([{"text": "ab", "conversations": "human"}], None),
        ([{"text": "ab", "conversations": ["human", "gpt"]}], None),
        (conversations(ASKED), asked_in_text),
        ([{"input_ids": [97], "conversations": ASKED}], None),
    ],
    ids=[
        "roles of TRL",
        "roles of TRL in the first row",
        "role and content",
        "a text",
        "texts",
        "a formatting function",
        "tokens",
    ],
)
def test_other_datasets_are_prepared_as_trl_does(rows: list[Row], function: Any, switch: Any) -> None:
    prepared = Prepared(rows, function=function)
    assert prepared.acts == 0
    with switch.off():
        assert Prepared(rows, function=function).rows == prepared.rows


def handed_on(dataset: Any) -> Any:
    """Return the dataset that TRL's method would be given. It refuses these ones."""

    def method(
        dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        return dataset

    return name_the_roles(Call(method, None, (dataset, Tokenizer(), SimpleNamespace(), False, None, "train")))


def test_what_is_no_dataset_is_handed_on() -> None:
    rows = conversations(ASKED)
    assert handed_on(rows) is rows


def test_columns_that_are_not_trained_on_are_handed_on() -> None:
    dataset = stream([{"chosen": ASKED, "rejected": ASKED}])
    assert handed_on(dataset) is dataset


@pytest.mark.parametrize("name", ["conversations", "messages", "prompt", "completion"])
def test_of_each_column_the_roles_alone_are_another(name: str) -> None:
    (row,) = handed_on(stream([{name: ASKED, "text": "human"}]))
    assert row == {name: RENAMED, "text": "human"}
