"""Each form of a text has a sibling with the same tokens, which a right trainer sees."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.relations import texts as _texts  # noqa: F401
from trl_hotfix.relations.materials import tokenizer
from trl_hotfix.relations.setting import Setting

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

TEXT = {"text": "w1 w2 w3"}
ANSWERED = {"prompt": "w1 w2", "completion": " w3 w4"}
PAIR = {"prompt": "w1", "chosen": " w2 w3", "rejected": " w4"}


def in_form(row: dict[str, Any], form: str, marks: str = "") -> tuple[dict[str, Any], Any]:
    from trl_hotfix.relations import forms

    words = tokenizer(Setting(arguments={"assistant_only_loss": "marked" in form}), "left")
    words = forms.with_marks(words, marks) if marks else words
    (found,) = forms.in_form(datasets.Dataset.from_list([row]), form, words)
    return found, words


def ids(words: Any, text: str) -> list[int]:
    found: list[int] = words(text, add_special_tokens=False)["input_ids"]
    return found


def rendered(words: Any, messages: Any, **options: Any) -> str:
    found: str = words.apply_chat_template(messages, tokenize=False, **options)
    return found


@pytest.mark.parametrize("marks", ["", "begin"])
def test_a_text_of_a_template_begins_and_ends_as_the_template_writes_it(marks: str) -> None:
    text, words = in_form(TEXT, "text of a template", marks)
    turns, of_turns = in_form(TEXT, "conversation", marks)
    assert text["text"] == rendered(of_turns, turns["messages"])
    assert ids(words, text["text"]) == [*([2] if marks else []), 4, 5, 6, 1]
    prompt, _ = in_form(PAIR, "text of a template", marks)
    assert prompt == {**PAIR, "prompt": f"{'<unk>' if marks else ''}w1"}


def test_an_answer_with_a_header_has_it_in_the_prompt() -> None:
    apart, words = in_form(ANSWERED, "prompt with a header")
    turns, of_turns = in_form(ANSWERED, "conversation with a header")
    prompt = rendered(of_turns, turns["prompt"], add_generation_prompt=True)
    assert ids(words, prompt) == ids(words, apart["prompt"])
    whole = rendered(of_turns, turns["prompt"] + turns["completion"])
    assert ids(words, whole) == ids(words, apart["prompt"] + apart["completion"] + "<eos>")
    assert whole.startswith(prompt)


def test_a_prompt_ends_inside_a_word_of_the_same_text() -> None:
    found, words = in_form(ANSWERED, "prompt that ends inside a word")
    assert found["prompt"] + found["completion"] == ANSWERED["prompt"] + ANSWERED["completion"]
    assert ids(words, found["prompt"])[:2] == ids(words, ANSWERED["prompt"])
    assert len(ids(words, found["prompt"])) == 3


def test_a_chosen_answer_begins_as_the_template_begins_one() -> None:
    texts, words = in_form(PAIR, "pair whose chosen answer has a header")
    turns, of_turns = in_form(PAIR, "conversation whose prompt begins the answer")
    prompt = rendered(of_turns, turns["prompt"], add_generation_prompt=True)
    chosen, rejected = (rendered(of_turns, turns["prompt"] + turns[side]) for side in ("chosen", "rejected"))
    assert chosen.startswith(prompt)
    assert not rejected.startswith(prompt)
    assert ids(words, chosen) == ids(words, f"{texts['prompt']}{texts['chosen']}<eos>")


def test_two_answers_without_a_prompt_share_no_letter() -> None:
    plain, words = in_form(PAIR, "pair without prompt")
    spaced, _ = in_form(PAIR, "pair without prompt that ends with a space")
    assert plain["chosen"][0] != plain["rejected"][0]
    assert spaced["chosen"] == f"{plain['chosen']} "
    assert ids(words, spaced["chosen"]) == ids(words, plain["chosen"])
    assert "prompt" not in plain


def test_a_prompt_that_begins_the_answer_is_the_plain_one() -> None:
    turns, words = in_form({"prompt": "w1 w2 w3"}, "conversation that begins the answer")
    assert [turn["role"] for turn in turns["prompt"]] == ["user", "assistant"]
    # A trainer leaves out what the template writes behind the last message.
    assert ids(words, rendered(words, turns["prompt"])) == [4, 5, 6, words.eos_token_id]


def test_a_marked_answer_and_one_that_is_cut_off_have_the_same_tokens() -> None:
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    marked, words = in_form({"messages": messages}, "conversation with its answers marked")
    cut, _ = in_form(ANSWERED, "conversation cut before the answer")
    assert cut["prompt"] + cut["completion"] == marked["messages"] == messages
    found = words.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert found["input_ids"] == [4, 5, 6, 7, 1]
    assert found["assistant_masks"] == [0, 0, 1, 1, 0]


@pytest.mark.parametrize("marks", ["", "begin"])
def test_a_template_writes_its_beginning_whoever_else_does(marks: str) -> None:
    turns, words = in_form(TEXT, "conversation with a beginning", marks)
    assert ids(words, rendered(words, turns["messages"])) == [2, 4, 5, 6, 1]


def test_a_line_behind_the_end_is_a_token() -> None:
    turns, words = in_form(PAIR, "conversation with a line behind the end")
    line = words.convert_tokens_to_ids("\n")
    assert ids(words, rendered(words, turns["prompt"] + turns["chosen"])) == [4, 5, 6, 1, line]


@pytest.mark.parametrize(
    ("row", "form", "expected"),
    [
        (TEXT, "another field", {"story": "w1 w2 w3"}),
        (TEXT, "prompt and completion beside a text", {"prompt": "w1", "completion": " w2 w3", "text": "w1 w2 w3"}),
        (TEXT, "tokens with labels", {"input_ids": [4, 5, 6, 1], "labels": [-100, -100, 6, 1]}),
        ({"prompt": "w1 w2 w3"}, "last two words", {"prompt": "w2 w3"}),
    ],
)
def test_rows_in_other_columns(row: dict[str, Any], form: str, expected: dict[str, Any]) -> None:
    found, _ = in_form(row, form)
    assert found == expected
