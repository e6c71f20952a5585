"""Plain texts and completions of a batch with images end with the end-of-sequence token, which is the character 1."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer

from trl_hotfix.testing import CharacterProcessor, messages

import tiny

ID = "sft-vlm-standard-format-no-eos"
PROMPTS, COMPLETIONS = ("x", "yz", "\2v"), ("ab", "c", "d\1")
ENDED = ["ab\1", "c\1", "d\1"]


def collator_of(**settings: Any) -> Any:
    return sft_trainer.DataCollatorForVisionLanguageModeling(CharacterProcessor(), **settings)


def pairs(completions: tuple[str, ...] = COMPLETIONS) -> list[dict[str, Any]]:
    images = ([], [], [7])
    columns = zip(images, PROMPTS, completions, strict=True)
    return [{"images": taken, "prompt": text, "completion": end} for taken, text, end in columns]


def labelled(batch: Any) -> list[str]:
    """Return the characters of each row that are labels."""
    return ["".join(chr(label) for label in row if label != -100) for row in batch["labels"].tolist()]


class Recorder(sft_trainer.DataCollatorForVisionLanguageModeling):
    """A collator that returns the examples that TRL would tokenise."""

    def _collate_language_modeling(self, examples: Any) -> Any:
        return examples

    _collate_prompt_completion = _collate_language_modeling


def handed_on(examples: Any, *, eos_token: str | None = "\1", **settings: Any) -> Any:
    collator = Recorder(CharacterProcessor(), **settings)
    collator.processor.tokenizer.eos_token = eos_token
    return collator(examples)


def test_each_completion_ends_in_each_batch_of_each_trainer() -> None:
    for collator in [collator_of(completion_only_loss=True) for _ in range(2)]:
        for _ in range(2):
            assert labelled(collator(pairs())) == ENDED
        with torch.no_grad():
            assert labelled(collator.torch_call(examples=pairs())) == ENDED


def test_trl_ends_none(switch: Any) -> None:
    with switch.off():
        assert labelled(collator_of(completion_only_loss=True)(pairs())) == list(COMPLETIONS)


def test_the_prompts_stay_as_they_are() -> None:
    batch = collator_of(completion_only_loss=False)(pairs())
    assert labelled(batch) == ["xab\1", "yzc\1", "\2\2vd\1"]
    assert batch["input_ids"].tolist()[0][:4] == [ord("x"), ord("a"), ord("b"), 1]


def test_the_rows_of_the_dataset_stay_as_they_are() -> None:
    rows = pairs()
    before = copy.deepcopy(rows)
    handed = handed_on(rows)
    assert rows == before
    assert handed == [{**row, "completion": end} for row, end in zip(before, ENDED, strict=True)]
    assert handed[2] is rows[2]


def test_an_empty_completion_ends() -> None:
    assert handed_on(pairs(("", "c", "")))[0]["completion"] == "\1"


def test_another_end_of_the_tokenizer_is_appended() -> None:
    handed = handed_on(pairs(("ab", "c</s>", "d\1")), eos_token="</s>")
    assert [row["completion"] for row in handed] == ["ab</s>", "c</s>", "d\1</s>"]


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [(None, ["a\1", "bc\1", "abcde\1", "\1"]), (4, ["a\1", "bc\1", "abcd", "\1"])],
    ids=["whole", "cut"],
)
@pytest.mark.parametrize("field", ["text", "content"])
def test_the_texts_of_the_column_of_texts_end(field: str, max_length: int | None, expected: list[str]) -> None:
    collator = collator_of(dataset_text_field=field, max_length=max_length)
    # A completion beside the texts is no text of theirs.
    rows = [{"images": [], field: text, "completion": "z"} for text in ("a\1", "bc", "abcde", "")]
    for _ in range(2):
        assert labelled(collator(rows)) == expected


def test_a_batch_has_the_format_of_its_first_row() -> None:
    assert handed_on([{"text": "a"}, {"completion": "b"}]) == [{"text": "a\1"}, {"completion": "b"}]
    first, second = {"prompt": "x", "completion": "a"}, {"text": "b"}
    assert handed_on([first, second]) == [{**first, "completion": "a\1"}, second]


PAIR, MESSAGES = {"prompt": "x", "completion": "y"}, messages("ua")


@pytest.mark.parametrize(
    ("examples", "settings"),
    [
        ([{**PAIR, "completion": "y\1"}, {**PAIR, "completion": "\1"}], {}),
        ([{**PAIR, "text": "y\1"}], {}),
        ([{"prompt": MESSAGES, "completion": MESSAGES}], {}),
        ([{"messages": MESSAGES, "text": "y"}, {"text": "y"}], {}),
        ([PAIR], {"eos_token": None}),
    ],
    ids=["ended", "ended texts", "a conversation", "messages beside a text", "a tokenizer without an end"],
)
def test_a_batch_with_nothing_to_end_is_trls(examples: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    before = copy.deepcopy(examples)
    with tiny.counted(ID) as counts:
        assert handed_on(examples, **settings) is examples
        assert not counts().acted
    assert examples == before


def test_a_batch_with_something_to_end_counts() -> None:
    with tiny.counted(ID) as counts:
        handed_on(pairs())
        handed_on(pairs(("a\1", "b\1", "c")))
        assert counts().acted == 2


def test_trl_refuses_prompts_without_completions() -> None:
    with pytest.raises(KeyError, match="Unexpected input keys"):
        handed_on([{"prompt": "x"}])
