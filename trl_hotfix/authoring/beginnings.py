"""The beginning-of-sequence token that a tokenizer puts before a text."""

from __future__ import annotations

from typing import Any


def adds_beginning(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts a beginning-of-sequence token before a text, such as those of Llama 3."""
    beginning = tokenizer.bos_token_id
    if beginning is None:
        return False
    # A tokenizer may end a text with that token instead.
    expected = [beginning, *tokenizer("a", add_special_tokens=False)["input_ids"]]
    return bool(tokenizer("a")["input_ids"][: len(expected)] == expected)
