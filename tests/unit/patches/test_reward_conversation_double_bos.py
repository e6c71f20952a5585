"""One beginning is left out where two stand at the front because the tokenizer adds one, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.call import Call
from trl_hotfix.patches import reward_conversation_double_bos as patch


class Tokenizer(patch._Beginning):
    pass


class Silent(Tokenizer):
    """It adds nothing."""

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(text, add_special_tokens=False)


class Ending(Tokenizer):
    """It ends a text with the token that begins others."""

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(text + "\2" * add_special_tokens, add_special_tokens=False)


class BothEnds(Tokenizer):
    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__(text + "\1" * add_special_tokens, add_special_tokens=add_special_tokens)


class WithoutBeginning(Silent):
    bos_token_id = None


Columns = dict[str, list[list[int]]]


def tokenize(batch: dict[str, list[str]], tokenizer: Any) -> Columns:
    """Return ids and masks of both sides, as TRL does. A mask has the ids plus 10, which tells where it is cut."""
    columns: Columns = {}
    for side in ("chosen", "rejected"):
        columns[f"input_ids_{side}"] = [tokenizer(text)["input_ids"] for text in batch[side]]
        columns[f"attention_mask_{side}"] = [[10 + token for token in ids] for ids in columns[f"input_ids_{side}"]]
    return columns


def texts_of(columns: Columns) -> dict[str, list[str]]:
    """Return the texts of the ids, whose masks fit them."""
    for name, rows in columns.items():
        if name.startswith("input_ids"):
            assert columns[name.replace("input_ids", "attention_mask")] == [
                [10 + token for token in ids] for ids in rows
            ]
    return {side: ["".join(map(chr, ids)) for ids in columns[f"input_ids_{side}"]] for side in ("chosen", "rejected")}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_each_text_of_each_side_begins_once(side: str, by_name: bool) -> None:
    other = {"chosen": "rejected", "rejected": "chosen"}[side]
    batch = {side: ["\2ab", "c", "\2", "\2\2d", ""], other: ["e\2", "", "f", "\2", "ghi"]}
    given: Any = {"batch": batch, "tokenizer": Tokenizer()}
    args, kwargs = ((), given) if by_name else (tuple(given.values()), {})
    texts = texts_of(patch.begin_once(Call(tokenize, None, args, kwargs)))
    assert texts[side] == ["\2ab", "\2c", "\2", "\2\2d", "\2"]
    assert texts[other] == ["\2e\2", "\2", "\2f", "\2", "\2ghi"]


def test_an_end_that_the_tokenizer_adds_stays() -> None:
    texts = texts_of(patch.begin_once(Call(tokenize, None, ({"chosen": ["\2a"], "rejected": ["b"]}, BothEnds()))))
    assert texts == {"chosen": ["\2a\1"], "rejected": ["\2b\1"]}


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [(Tokenizer(), "a"), (Silent(), "\2\2a"), (Ending(), "\2\2a"), (WithoutBeginning(), "\2\2a"), (Tokenizer(), "")],
    ids=["another text", "a tokenizer that adds nothing", "one that ends texts", "one without a beginning", "no text"],
)
def test_what_the_tokenizer_has_not_doubled_is_returned_as_it_is(tokenizer: Any, text: str) -> None:
    returned: list[Any] = []

    def recorded(batch: Any, tokenizer: Any) -> Columns:
        returned.append(tokenize(batch, tokenizer))
        return returned[-1]

    columns = patch.begin_once(Call(recorded, None, ({"chosen": [text], "rejected": [text]}, tokenizer)))
    assert columns is returned[0]
    assert texts_of(columns) == texts_of(tokenize({"chosen": [text], "rejected": [text]}, tokenizer))


def test_what_trl_has_returned_is_not_changed_in_place() -> None:
    before = tokenize({"chosen": ["\2a"], "rejected": ["\2b"]}, Tokenizer())
    patch.begin_once(Call(lambda batch, tokenizer: before, None, ({}, Tokenizer())))
    assert texts_of(before) == {"chosen": ["\2\2a"], "rejected": ["\2\2b"]}
