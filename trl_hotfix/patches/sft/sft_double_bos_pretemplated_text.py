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
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, sft_prepared


def begin_once(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give TRL a tokenizer that begins texts once (0.17.0 and later)."""
    return _begin_once(wrapped, args, kwargs, _text_of)


def begin_conversations_once(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give TRL a tokenizer that begins texts and conversations once (0.15.0 to 0.16.1)."""
    return _begin_once(wrapped, args, kwargs, _text_or_conversation_of)


def _begin_once(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], text_of: Callable[..., Any]
) -> Any:
    """Call the method with such a tokenizer if the first text would begin twice, or is a formatting function's."""
    from datasets import Dataset, IterableDataset

    dataset, given, settings, formatting_func = (
        argument(wrapped, args, kwargs, name) for name in ("dataset", "processing_class", "args", "formatting_func")
    )
    # A view of another patch's would take what is asked here for the first row.
    tokenizer = inspect.unwrap(given)
    if not isinstance(dataset, (Dataset, IterableDataset)) or not _adds_a_beginning(tokenizer):
        return wrapped(*args, **kwargs)
    first = next(iter(dataset))
    if "input_ids" in first:
        return wrapped(*args, **kwargs)
    if formatting_func is None:
        text = text_of(first, tokenizer, settings.dataset_text_field)
        if not isinstance(text, str) or _own_ids(tokenizer, text)[:1] != [tokenizer.bos_token_id]:
            return wrapped(*args, **kwargs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "processing_class", _beginning_once(given))
    return wrapped(*args, **kwargs)


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


class _Beginning(CharacterTokenizer):
    """A tokenizer that puts the character 2 before a text, and whose chat template does so, too."""

    bos_token: Any = "\2"
    bos_token_id: Any = 2

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__("\2" * add_special_tokens + text)

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return "\2" + super().render(messages, add_generation_prompt=add_generation_prompt)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        text = self.render(messages, add_generation_prompt=add_generation_prompt)
        encoded = self(text, add_special_tokens=False)
        return text if not tokenize else encoded if return_dict else encoded["input_ids"]


def texts_begin_once(module: ModuleType) -> Outcome:
    """Count the beginnings of texts that begin with the token, beside others."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("dataset_kwargs says whether special tokens are added in this release")
    texts = ["\2ab", "c", "\2d", "\2\2e", "f\2"]
    found = _texts(module, [{"text": text} for text in texts])
    right, wrong = ["\2ab", "\2c", "\2d", "\2\2e", "\2f\2"], ["\2\2ab", "\2c", "\2\2d", "\2\2\2e", "\2f\2"]
    counts = [sum(text.count("\2") for text in texts) for texts in (found, right, wrong)]
    outcome = judge(counts[0], right=counts[1], wrong=counts[2], texts=found)
    if outcome.verdict is Verdict.FIXED:
        mistakes = [f"the texts are {found}"] * (found != right) + _mistakes_elsewhere(module, texts, right)
        if mistakes:
            raise AssertionError("; ".join(mistakes))
    return outcome


def _texts(module: ModuleType, rows: list[dict[str, Any]], function: Any = None, **settings: Any) -> list[str]:
    """Return what is tokenised of each row, without the end of sequence."""
    tokenizer, settings = _Beginning(), {"dataset_text_field": "text", "completion_only_loss": False, **settings}
    prepared = sft_prepared(module, rows, tokenizer, function, **settings)
    of_tokens = ("input_ids", "attention_mask", "completion_mask")
    if any(len({len(row[name]) for name in of_tokens if name in row}) != 1 for row in prepared):
        raise AssertionError(f"the ids and masks of a row differ in length: {prepared}")
    return [tokenizer.decode(row["input_ids"]).removesuffix("\1") for row in prepared]


def _mistakes_elsewhere(module: ModuleType, texts: list[str], right: list[str]) -> list[str]:
    """Return what is wrong with other columns and with conversations, and where the tokenizer is to stay."""
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    older = [{"from": "user", "value": "ab"}, {"from": "assistant", "value": "c"}]
    tokenised = {
        "content": _texts(module, [{"content": text} for text in texts], dataset_text_field="content"),
        "formatted": _texts(module, [{"question": text} for text in texts], lambda row: row["question"]),
        "pairs": _texts(module, [{"prompt": text, "completion": "z"} for text in texts]),
        "messages": _texts(module, [{"messages": messages}]),
        "prompt and completion": _texts(module, [{"prompt": messages[:1], "completion": messages[1:]}]),
    }
    expected = dict.fromkeys(("content", "formatted"), right)
    conversation = ["\2uab\1ac"]
    expected |= {"pairs": [f"{text}z" for text in right], "messages": conversation}
    expected["prompt and completion"] = conversation
    if hasattr(module, "maybe_convert_to_chatml"):
        tokenised["conversations"] = _texts(module, [{"conversations": older}])
        expected["conversations"] = conversation
    mistakes = [f"of {name}, {tokenised[name]} are tokenised" for name in expected if tokenised[name] != expected[name]]
    return mistakes + _mistakes_of_the_wrappers(messages)


def _mistakes_of_the_wrappers(messages: list[dict[str, str]]) -> list[str]:
    """Return which tokenizers the wrappers replace that are to stay, and which they leave that are not."""

    class Silent(_Beginning):
        """It adds nothing."""

        def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
            return super().__call__(text, add_special_tokens=False)

    class Ending(_Beginning):
        """It ends a text with the token that begins others."""

        def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
            return super().__call__(text + "\2" * add_special_tokens, add_special_tokens=False)

    begun, tokenizer = {"text": "\2ab"}, _Beginning()
    rows: dict[str, tuple[Any, Any, Any, bool]] = {
        "a text that begins": (_dataset([begun]), tokenizer, None, True),
        "another text": (_dataset([{"text": "ab"}]), tokenizer, None, False),
        "a formatting function": (_dataset([{"question": "ab"}]), tokenizer, str, True),
        "tokens": (_dataset([{**begun, "input_ids": [2]}]), tokenizer, str, False),
        "no dataset": ([begun], tokenizer, None, False),
        "no text": (_dataset([{"content": "ab"}]), tokenizer, None, False),
        "a prompt that begins": (_dataset([{"prompt": "\2a", "completion": "b"}]), tokenizer, None, True),
        "a prompt beside a text": (_dataset([{"prompt": "a", "completion": "b", **begun}]), tokenizer, None, False),
        "a prompt alone": (_dataset([{"prompt": "a", **begun}]), tokenizer, None, True),
        "a completion alone": (_dataset([{"completion": "a", **begun}]), tokenizer, None, True),
        "no beginning": (_dataset([begun]), CharacterTokenizer(), None, False),
        "a tokenizer that adds nothing": (_dataset([begun]), Silent(), None, False),
        "a tokenizer that ends the texts": (_dataset([begun]), Ending(), None, False),
        "a processor": (_dataset([begun]), SimpleNamespace(tokenizer=tokenizer), None, False),
    }
    mistakes = []
    settings = SimpleNamespace(dataset_text_field="text")
    for wrapper in (begin_once, begin_conversations_once):
        cases = {
            **rows,
            "a conversation": (_dataset([{"messages": messages}]), tokenizer, None, wrapper is not begin_once),
        }
        for name, (dataset, words, function, is_replaced) in cases.items():
            passed = wrapper(_tokenizer, None, (dataset, words), {"args": settings, "formatting_func": function})
            if (passed is not words) != is_replaced:
                mistakes.append(f"{name}: the tokenizer is {passed}")
    if type(tokenizer) is not _Beginning or tokenizer("\2a")["input_ids"] != [2, 2, 97]:
        mistakes.append("the user's tokenizer is changed")
    for name, words, expected in (
        ("another patch", _seen(tokenizer, 1), [2, 97, 3]),
        ("the user", _view_of_the_users(tokenizer), [2, 97]),
    ):
        once = begin_once(_tokenizer, None, (_dataset([begun]), words), {"args": settings, "formatting_func": None})
        if once("\2a")["input_ids"] != expected:
            mistakes.append(f"the view of {name} gives {once(chr(2) + 'a')}")
    return mistakes


def _seen(tokenizer: Any, more: int) -> Any:
    """Return a view of another patch, which adds the number of tokens that it sees, and ``more``."""
    import wrapt

    class Seen(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return _seen, (self.__wrapped__, more)

        def __call__(self, text: str) -> Any:
            ids = self.__wrapped__(text)["input_ids"]
            return {"input_ids": [*ids, len(ids) + more]}

    return Seen(tokenizer)


def _view_of_the_users(tokenizer: Any) -> Any:
    """Return a view that is in no patch, and cannot be pickled."""
    import wrapt

    class Users(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        __module__ = "users"

    return Users(tokenizer)


def _dataset(rows: list[dict[str, Any]]) -> Any:
    """Return a dataset that can be iterated and nothing else. A real one takes milliseconds to make."""
    from datasets import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __iter__(self) -> Any:
            return iter(rows)

    return Rows()


def _tokenizer(dataset: Any, processing_class: Any, args: Any, formatting_func: Any) -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrappers read, and return the tokenizer."""
    return processing_class
