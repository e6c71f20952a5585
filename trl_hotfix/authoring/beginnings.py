"""The beginning-of-sequence token that a tokenizer puts before a text."""

from __future__ import annotations

import copy
from typing import Any

from .views import pickled_as_made


def adds_beginning(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts a beginning-of-sequence token before a text, such as those of Llama 3."""
    beginning = tokenizer.bos_token_id
    if beginning is None:
        return False
    # A tokenizer may end a text with that token instead.
    expected = [beginning, *tokenizer("a", add_special_tokens=False)["input_ids"]]
    return bool(tokenizer("a")["input_ids"][: len(expected)] == expected)


def beginning_once(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that leaves out the first of two beginnings, which is the one that it has added.

    The text is tokenized as it is: without the token in front, tokenizers of SentencePiece would put a blank there.
    The view of another patch has to see the ids that TRL sees, so this one goes beneath it.
    """
    import wrapt

    if hasattr(tokenizer, "__wrapped__") and type(tokenizer).__module__.startswith("trl_hotfix.patches."):
        tokenizer.__wrapped__ = beginning_once(tokenizer.__wrapped__)
        return tokenizer
    beginnings = [tokenizer.bos_token_id] * 2

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return pickled_as_made(beginning_once, self.__wrapped__)

        def __deepcopy__(self, memo: Any) -> Any:
            # KTO concatenates streams, which datasets copies with what their functions are given.
            return beginning_once(copy.deepcopy(self.__wrapped__, memo))

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            encoded = self.__wrapped__(*args, **kwargs)
            if encoded["input_ids"][:2] == beginnings:
                for name in list(encoded):
                    encoded[name] = encoded[name][1:]
            return encoded

    return View(tokenizer)
