from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from trl_hotfix.relations.materials import tokenizer
from trl_hotfix.relations.setting import Setting

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

TEXT = {"text": "w1 w2 w3"}
PAIR = {"prompt": "w1", "chosen": " w2 w3", "rejected": " w4"}


def in_form(row: dict[str, Any], form: str, marks: str = "") -> tuple[dict[str, Any], Any]:
    from trl_hotfix.relations import forms

    words = tokenizer(Setting(), "left")
    words = forms.with_marks(words, marks) if marks else words
    (found,) = forms.in_form(datasets.Dataset.from_list([row]), form, words)
    return found, words


@pytest.mark.parametrize("marks", ["", "begin"])
def test_a_text_has_the_same_tokens_in_each_form(marks: str) -> None:
    expected, words = in_form(TEXT, "tokens", marks)
    parts, _ = in_form(TEXT, "prompt and completion", marks)
    assert words(parts["prompt"] + parts["completion"])["input_ids"] + [words.eos_token_id] == expected["input_ids"]
    turns, words = in_form(TEXT, "conversation", marks)
    rendered = words.apply_chat_template(turns["messages"], tokenize=False)
    assert words(rendered, add_special_tokens=False)["input_ids"] == expected["input_ids"]
    parts, _ = in_form(TEXT, "conversation in two", marks)
    assert parts["prompt"] + parts["completion"] == turns["messages"]


def test_a_pair_as_a_conversation_has_its_prompt_apart_or_in_front() -> None:
    apart, _ = in_form(PAIR, "conversation")
    in_front, _ = in_form(PAIR, "conversation without prompt")
    for side in ("chosen", "rejected"):
        assert in_front[side] == apart["prompt"] + apart[side]
        assert apart[side][0]["content"] == PAIR[side].strip()


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "w1", "completion": " w2", "label": True}, "conversation with label"),
        ({**PAIR, "reference": " w5"}, "conversation of three"),
        ({"prompt": "w1", "privileged_context": "w6"}, "conversation with context"),
    ],
)
def test_a_conversation_has_all_that_its_row_has(row: dict[str, Any], form: str) -> None:
    importlib.import_module("trl_hotfix.relations.conversations")
    turns, words = in_form(row, form)
    assert turns.keys() == row.keys()
    for name, value in row.items():
        if isinstance(turns[name], list):
            (turn,) = turns[name]
            assert turn == {"role": "user" if name == "prompt" else "assistant", "content": value.strip()}
        else:
            assert turns[name] == value
    assert isinstance(turns["prompt"], list)
    assert "assistant" in words.chat_template


def test_an_extra_column_leaves_the_others() -> None:
    row, _ = in_form(PAIR, "extra column")
    assert row == {**PAIR, "note": "of w1"}


def test_words_behind_the_end_are_in_the_tokens_and_in_the_conversation() -> None:
    expected, _ = in_form(TEXT, "tokens of a template with words behind the end")
    turns, words = in_form(TEXT, "conversation with words behind the end")
    rendered = words.apply_chat_template(turns["messages"], tokenize=False)
    assert words(rendered)["input_ids"] == expected["input_ids"] == [4, 5, 6, words.eos_token_id, 10]


def test_a_call_is_in_the_text_as_it_is_in_the_row() -> None:
    row, _ = in_form(TEXT, "text of calls in a template")
    (call,) = in_form(TEXT, "conversation with calls")[0]["messages"][-1]["tool_calls"]
    assert json.dumps(call) in row["text"]


def test_tools_as_json_are_the_tools() -> None:
    row, _ = in_form(TEXT, "conversation and tools")
    as_json, _ = in_form(TEXT, "conversation and tools as JSON")
    assert json.loads(as_json["tools"]) == row["tools"]
    assert as_json["messages"] == row["messages"]


def test_marks_of_a_tokenizer() -> None:
    from trl_hotfix.relations import forms

    def ids(marks: str) -> list[int]:
        words = forms.with_marks(tokenizer(Setting(), "left"), marks)
        assert (words.pad_token_id == words.eos_token_id) == (marks == "pad is end")
        found: list[int] = words("w0")["input_ids"]
        return found

    assert [ids(marks) for marks in ("pad is end", "begin", "end")] == [[3], [2, 3], [3, 1]]
