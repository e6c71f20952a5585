"""RewardTrainer puts a second beginning-of-sequence token before what the chat template has rendered.

TRL 0.12.0 begins to render conversations to texts, whose first word is the ``<|begin_of_text|>`` or ``<bos>`` of the
template, and ``_tokenize`` tokenizes them as any text. 0.24.0 has the template tokenize, so that nothing is added.

The target is the function that is mapped: the wrapper acts before TRL leaves out the rows that are too long, in every
process, and ``datasets`` knows the rows of the patched function from those in its cache. A text is tokenized as it is,
since tokenizers of SentencePiece would put a blank where the token in front is missing.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, adds_beginning, judge, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer


@wrapper
def begin_once(call: Call) -> Any:
    """Leave out the first of two beginnings, with its mask."""
    columns: dict[str, list[list[int]]] = call()
    tokenizer = call["tokenizer"]
    beginnings = [tokenizer.bos_token_id] * 2
    is_double = {side: [ids[:2] == beginnings for ids in columns[f"input_ids_{side}"]] for side in _SIDES}
    if not any(map(any, is_double.values())) or not adds_beginning(tokenizer):
        return columns
    return {
        name: [row[double:] for row, double in zip(rows, is_double[name.rpartition("_")[2]], strict=True)]
        for name, rows in columns.items()
    }


_SIDES = ("chosen", "rejected")


class _Beginning(CharacterTokenizer):
    """A tokenizer that puts the character 2 before a text."""

    bos_token_id: Any = 2

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__("\2" * add_special_tokens + text)


def conversations_begin_once(module: ModuleType) -> Outcome:
    """Count the beginnings of four texts. The template has begun each of them."""
    if "batch" not in inspect.signature(module._tokenize).parameters:
        return absent("in this release the function does not tokenize what the chat template has rendered")
    pairs = {"chosen": ["\2uab\1ac\1", "\2ud\1ae\1"], "rejected": ["\2uab\1afgh\1", "\2ud\1a\1"]}
    columns = module._tokenize(pairs, _Beginning())
    return judge(sum(ids.count(2) for side in _SIDES for ids in columns[f"input_ids_{side}"]), right=4, wrong=8)
