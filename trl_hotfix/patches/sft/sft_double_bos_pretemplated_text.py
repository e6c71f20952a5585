"""SFT puts a second beginning-of-sequence token before a text that begins with one.

A text that has been through a chat template begins with ``<|begin_of_text|>`` or ``<bos>``. ``_prepare_dataset``
tokenises it by ``processing_class(text=...)``, which adds the token as to any other text. Up to 0.14
``dataset_kwargs={"add_special_tokens": False}`` was the remedy; from 0.15.0 on nothing reads it. Up to 0.16.1 the texts
that TRL itself renders from conversations are tokenised so, too.

The wrapper gives TRL a view of the tokenizer that leaves the second token out of what it returns. The text is tokenised
as it is: without the token in front, tokenizers of SentencePiece would put a blank there.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, sft_prepared


@wrapper
def begin_once(call: Call) -> Any:
    """Give TRL a tokenizer that begins texts once (0.17.0 and later)."""
    return _begin_once(call, _text_of)


@wrapper
def begin_conversations_once(call: Call) -> Any:
    """Give TRL a tokenizer that begins texts and conversations once (0.15.0 to 0.16.1)."""
    return _begin_once(call, _text_or_conversation_of)


def _begin_once(call: Call, text_of: Callable[..., Any]) -> Any:
    """Call the method with such a tokenizer if the first text would begin twice, or is a formatting function's."""
    from datasets import Dataset, IterableDataset

    dataset, given = call["dataset"], call["processing_class"]
    # A view of another patch's would take what is asked here for the first row.
    tokenizer = inspect.unwrap(given)
    if not isinstance(dataset, (Dataset, IterableDataset)) or not _adds_a_beginning(tokenizer):
        return call()
    first = next(iter(dataset))
    if "input_ids" in first:
        return call()
    if call["formatting_func"] is None:
        text = text_of(first, tokenizer, call["args"].dataset_text_field)
        if not isinstance(text, str) or _own_ids(tokenizer, text)[:1] != [tokenizer.bos_token_id]:
            return call()
    return call.with_(processing_class=_beginning_once(given))()


def _text_of(first: Mapping[str, Any], tokenizer: Any, field: str) -> Any:
    """Return what is tokenised from its beginning on."""
    return first["prompt"] if "prompt" in first and "completion" in first else first.get(field)


def _text_or_conversation_of(first: Mapping[str, Any], tokenizer: Any, field: str) -> Any:
    """Return what is tokenised, also of a conversation. Of a prompt and a completion it is the beginning."""
    from trl import data_utils

    # 0.15.0 takes no conversations of the older form.
    convert = getattr(data_utils, "maybe_convert_to_chatml", dict)
    row = convert(first)
    if not data_utils.is_conversational(row):
        return _text_of(first, tokenizer, field)
    rendered = data_utils.maybe_apply_chat_template(row, tokenizer)
    return rendered["text" if "text" in rendered else "prompt"]


def _own_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of the text alone."""
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def _adds_a_beginning(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts a beginning-of-sequence token before a text."""
    beginning = getattr(tokenizer, "bos_token_id", None)
    if beginning is None:
        return False
    expected = [beginning, *_own_ids(tokenizer, "a")]
    return bool(tokenizer("a")["input_ids"][: len(expected)] == expected)


def _beginning_once(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that leaves out the first of two beginnings.

    The view is pickled as a call of this function: for worker processes, and for the cache key of ``datasets``.
    ``code`` is a digest of this file. It is unused except that it changes that key when the file changes.
    """
    import wrapt

    seen = getattr(tokenizer, "__wrapped__", None)
    if seen is not None and type(tokenizer).__module__.startswith(f"{__package__}."):
        # The view of another patch has to see the ids that TRL sees, so ours goes beneath it.
        view, arguments = tokenizer.__reduce_ex__(2)
        return view(*(_beginning_once(seen) if value is seen else value for value in arguments))
    beginning = tokenizer.bos_token_id

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
            return _beginning_once, (self.__wrapped__, digest)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            encoded = self.__wrapped__(*args, **kwargs)
            if encoded["input_ids"][:2] == [beginning] * 2:
                for name in list(encoded):
                    encoded[name] = encoded[name][1:]
            return encoded

    return View(tokenizer)


def texts_begin_once(module: ModuleType) -> Outcome:
    """Count the beginnings of two prepared texts. One of them has its own, and the tokenizer puts one before each."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("dataset_kwargs says whether special tokens are added in this release")

    class Beginning(CharacterTokenizer):
        bos_token: Any = "\2"
        bos_token_id: Any = 2

        def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
            return super().__call__("\2" * add_special_tokens + text)

    prepared = sft_prepared(module, [{"text": "\2ab"}, {"text": "c"}], Beginning())
    return judge(sum(row["input_ids"].count(2) for row in prepared), right=2, wrong=3)
