"""One beginning is left out where two stand at the front because the tokenizer adds one, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from trl.trainer import reward_trainer

from trl_hotfix.call import Call
from trl_hotfix.patches.preference.reward_conversation_double_bos import begin_once
from trl_hotfix.testing import CharacterTokenizer

SIDES = ("chosen", "rejected")
Columns = dict[str, list[list[int]]]


class Tokenizer(CharacterTokenizer):
    """Puts ``front`` before a text and ``back`` behind it. The mask has the ids plus 10: it shows where it is cut."""

    def __init__(self, front: str = "\2", back: str = "", bos_token_id: Any = 2) -> None:
        self.front, self.back, self.bos_token_id = front, back, bos_token_id

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        rows = super().__call__(self.front + text + self.back if add_special_tokens else text)
        rows["attention_mask"] = [10 + token for token in rows["input_ids"]]
        return rows


def texts_of(columns: Columns) -> dict[str, list[str]]:
    """Return the texts of the ids, whose masks fit them."""
    for side in SIDES:
        rows = columns[f"input_ids_{side}"]
        assert columns[f"attention_mask_{side}"] == [[10 + token for token in ids] for ids in rows]
    return {side: ["".join(map(chr, ids)) for ids in columns[f"input_ids_{side}"]] for side in SIDES}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("side", "other"), [SIDES, SIDES[::-1]])
def test_each_text_of_each_side_begins_once(side: str, other: str, by_name: bool) -> None:
    batch = {side: ["\2ab", "c", "\2", "\2\2d", ""], other: ["e\2", "", "f", "\2", "ghi"]}
    given: dict[str, Any] = {"batch": batch, "tokenizer": Tokenizer()}
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    texts = texts_of(reward_trainer._tokenize(*args, **kwargs))
    assert texts[side] == ["\2ab", "\2c", "\2", "\2\2d", "\2"]
    assert texts[other] == ["\2e\2", "\2", "\2f", "\2", "\2ghi"]


def test_an_end_that_the_tokenizer_adds_stays() -> None:
    columns = reward_trainer._tokenize({"chosen": ["\2a"], "rejected": ["b"]}, Tokenizer(back="\1"))
    assert texts_of(columns) == {"chosen": ["\2a\1"], "rejected": ["\2b\1"]}


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (Tokenizer(), "a"),
        (Tokenizer(), ""),
        (Tokenizer(front=""), "\2\2a"),
        (Tokenizer(front="", back="\2"), "\2\2a"),
        (Tokenizer(front="", bos_token_id=None), "\2\2a"),
    ],
    ids=["another text", "no text", "it adds nothing", "it ends texts so", "it has no beginning"],
)
def test_what_the_tokenizer_has_not_doubled_is_returned_as_it_is(tokenizer: Any, text: str, switch: Any) -> None:
    batch = {"chosen": [text], "rejected": [text]}
    with switch.off():
        unpatched = reward_trainer._tokenize(batch, tokenizer)
    assert reward_trainer._tokenize(batch, tokenizer) == unpatched
    assert begin_once(Call(lambda batch, tokenizer: unpatched, None, (batch, tokenizer))) is unpatched


def test_what_trl_has_returned_is_not_changed_in_place(switch: Any) -> None:
    with switch.off():
        before = reward_trainer._tokenize({"chosen": ["\2a"], "rejected": ["\2b"]}, Tokenizer())
    begin_once(Call(lambda batch, tokenizer: before, None, ({}, Tokenizer())))
    assert texts_of(before) == {"chosen": ["\2\2a"], "rejected": ["\2\2b"]}
