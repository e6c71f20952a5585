"""What ``formatting_func`` returns is tokenised, whatever columns there are. Where it cannot be, a line says so."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.authoring import Call
from trl_hotfix.patches.sft.sft_formatting_func_ignored import tokenise_what_the_function_returns
from trl_hotfix.testing import CharacterTokenizer, recorded_warnings, sft_prepared, stream

import tiny

CONVERSATION = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "bad"}]
OLDER = [{"from": "user", "value": "bad"}, {"from": "assistant", "value": "bad"}]

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": CONVERSATION}, "text"),
    "older conversations": ({"conversations": OLDER}, "text"),
    "a pair": ({"prompt": "ba", "completion": "d", "other": "bad"}, "text"),
    "a pair of messages": ({"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:]}, "text"),
    "a text field": ({"content": "bad"}, "content"),
    "messages and a text field": ({"messages": CONVERSATION, "content": "bad"}, "content"),
}
"""Rows whose columns TRL tokenises instead, and the name in ``dataset_text_field``."""

each_kind = pytest.mark.parametrize(("row", "field"), KINDS.values(), ids=KINDS)


def formatted(example: Mapping[str, Any]) -> str:
    """Return the names of the columns. The function sees all of them under their own names."""
    return f"good {sorted(example)} {example.get('number')}"


def texts(rows: list[dict[str, Any]], function: Any = formatted, field: str = "text") -> list[str]:
    """Return the texts that are tokenised of rows, without the end of sequence."""
    tokenizer, settings = CharacterTokenizer(), {"dataset_text_field": field, "completion_only_loss": False}
    prepared = sft_prepared(sft_trainer, rows, tokenizer, function, **settings)
    return [tokenizer.decode(row["input_ids"]).removesuffix(tokenizer.eos_token) for row in prepared]


def skip_older_conversations(row: Mapping[str, Any]) -> None:
    if "conversations" in row and not hasattr(sft_trainer, "maybe_convert_to_chatml"):
        pytest.skip("this release takes no conversations of the older form")


@each_kind
def test_each_row_is_what_the_function_returns(row: dict[str, Any], field: str) -> None:
    skip_older_conversations(row)
    rows = [{**row, "number": number} for number in (1, 2)]
    assert texts(rows, field=field) == [formatted(example) for example in rows]


@each_kind
def test_trl_tokenises_the_columns(row: dict[str, Any], field: str, switch: Any) -> None:
    skip_older_conversations(row)
    with switch.off():
        (text,) = texts([row], field=field)
    assert "good" not in text
    assert "bad" in text


def test_a_prompt_alone_is_formatted() -> None:
    assert texts([{"prompt": "bad"}]) == [formatted({"prompt": "bad"})]


def test_a_row_without_a_column_of_trls_is_formatted_as_before(switch: Any) -> None:
    row = {"question": "bad", "answer": "good"}
    assert texts([row, row]) == [formatted(row)] * 2
    with switch.off():
        assert texts([row, row]) == [formatted(row)] * 2


def test_without_a_function_the_text_field_is_tokenised() -> None:
    assert texts([{"content": "bad"}], None, "content") == ["bad"]


@pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["a dataset", "a stream"])
def test_a_trainer_trains_and_evaluates_on_what_the_function_returns(make: Any, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"w{number} w2"}]} for number in (4, 6, 8)]
    trainer = tiny.trainer(
        SFTTrainer,
        model=tiny.llama(str(tmp_path), seed=0),
        args=tiny.config(SFTConfig, max_steps=1),
        train_dataset=make(rows[:2]),
        eval_dataset={"one": make(rows[2:]), "two": make(rows[:1])},
        tokenizer=tiny.chat_tokenizer(),
        formatting_func=lambda example: f"w40 {example['messages'][0]['content']} <eos>",
    )
    datasets = {"train": trainer.train_dataset, **trainer.eval_dataset}
    found = {name: [row["input_ids"] for row in dataset] for name, dataset in datasets.items()}
    assert found == {"train": [[43, 7, 5, 1], [43, 9, 5, 1]], "one": [[43, 11, 5, 1]], "two": [[43, 7, 5, 1]]}


def prepare(dataset: Any, args: Any, formatting_func: Any) -> tuple[Any, Any, Any]:
    """Stand for TRL's method, and return what it is given."""
    return dataset, args, formatting_func


class Trainer:
    """It can be referred to weakly, as a trainer can."""


def handed_on(dataset: Any, function: Any = formatted, trainer: Any = None, **settings: Any) -> tuple[Any, ...]:
    """Return what TRL's method is given, and whether each of these objects is what the wrapper was given."""
    given = dataset, SimpleNamespace(**{"dataset_text_field": "text", **settings}), function
    passed = tokenise_what_the_function_returns(Call(prepare, trainer or Trainer(), given))
    assert given[1].dataset_text_field == settings.get("dataset_text_field", "text")
    return (*passed, tuple(map(is_, passed, given)))


@pytest.mark.parametrize(
    ("dataset", "function"),
    [
        (stream([{"messages": CONVERSATION}]), None),
        (stream([{"input_ids": [98, 97], "messages": CONVERSATION}]), formatted),
        ([{"messages": CONVERSATION}], formatted),
        (stream([{"question": "bad"}]), formatted),
    ],
    ids=["without a function", "a tokenised dataset", "what is no dataset", "without a column of TRL's"],
)
def test_it_is_handed_on_as_it_is(dataset: Any, function: Any) -> None:
    assert handed_on(dataset, function)[3] == (True,) * 3


def test_a_tokenised_dataset_needs_no_settings() -> None:
    dataset = stream([{"input_ids": [98, 97]}])
    given = dataset, SimpleNamespace(), formatted
    assert all(map(is_, tokenise_what_the_function_returns(Call(prepare, Trainer(), given)), given))


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("messages", [*CONVERSATION, {}], True),
        ("conversations", OLDER, True),
        ("prompt", "a", True),
        ("prompt", CONVERSATION, True),
        ("chosen", CONVERSATION, True),
        ("rejected", CONVERSATION, True),
        ("completion", CONVERSATION, True),
        ("chosen", [], False),
        ("rejected", ["bad"], False),
        ("completion", [{"type": "text"}], False),
        ("completion", {"role": "user"}, False),
        ("completion", "bad", False),
        ("question", CONVERSATION, False),
    ],
)
def test_prompts_and_lists_of_messages_are_hidden(name: str, value: Any, is_hidden: bool) -> None:
    dataset, *_, same = handed_on(stream([{name: value, "other": 1}]))
    assert set(next(iter(dataset))) == {f"unformatted_{name}" if is_hidden else name, "other"}
    assert same == (not is_hidden,) * 3


def test_all_columns_of_trls_are_hidden_beside_a_prompt() -> None:
    dataset, *_ = handed_on(stream([{"prompt": "a", "completion": "b", "chosen": "c", "other": "d"}]))
    hidden = {f"unformatted_{name}" for name in ("prompt", "completion", "chosen")}
    assert set(next(iter(dataset))) == {*hidden, "other"}


def test_a_text_field_alone_hides_nothing_and_is_text_in_a_copy_of_the_settings() -> None:
    _, settings, _, same = handed_on(
        stream([{"content": "bad"}]), dataset_text_field="content", completion_only_loss=True, seed=3
    )
    assert same == (True, False, True)
    assert settings == SimpleNamespace(dataset_text_field="text", completion_only_loss=True, seed=3)


OBSTACLES: dict[str, Any] = {
    "assistant_only_loss=True": stream,
    "completion_only_loss=True": stream,
    "with_transform()": lambda rows: Dataset.from_list(rows).with_transform(lambda batch: batch),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_each_trainer_says_once_why_the_function_is_not_applied(obstacle: str) -> None:
    dataset, settings = OBSTACLES[obstacle]([{"messages": CONVERSATION}]), {obstacle.removesuffix("=True"): True}
    first = Trainer()
    with recorded_warnings() as warned:
        for trainer in (first, first, Trainer()):
            assert handed_on(dataset, trainer=trainer, dataset_text_field="content", **settings)[3] == (True,) * 3
    assert len(warned) == 2
    for line in warned:
        assert line.startswith("formatting_func is not applied: the dataset has the columns messages, which TRL")
        assert obstacle in line


def test_the_line_names_all_columns() -> None:
    with recorded_warnings() as warned:
        handed_on(stream([{"completion": "b", "prompt": "a", "other": "c"}]), completion_only_loss=True)
    assert "has the columns prompt, completion, which" in warned[0]


def test_a_loss_that_is_of_all_tokens_is_no_obstacle() -> None:
    with recorded_warnings() as warned:
        *_, same = handed_on(
            stream([{"messages": CONVERSATION}]), completion_only_loss=False, assistant_only_loss=False
        )
    assert same == (False,) * 3
    assert warned == []
