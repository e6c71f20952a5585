"""SFT of 0.15 does not end the texts that it tokenises.

``_prepare_dataset`` tokenises a text as it is (0.15.0, line 411), and most tokenizers add no end-of-sequence token.
Pull request 3091 appends it in 0.16.0 to the token ids of every row that does not end with it. From 0.17.0 on it is put
behind texts and completions alone, since a chat template ends a conversation in its own way.

The wrapper gives TRL a view of the tokenizer that appends it to what it returns.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, sft_prepared


def end_what_is_tokenised(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give TRL a tokenizer that ends texts, unless the dataset is tokenised already, or has conversations."""
    from datasets import Dataset, IterableDataset

    dataset, tokenizer, formatting_func = (
        argument(wrapped, args, kwargs, name) for name in ("dataset", "processing_class", "formatting_func")
    )
    is_dataset = isinstance(dataset, (Dataset, IterableDataset))
    if not is_dataset or getattr(tokenizer, "eos_token_id", None) is None:
        return wrapped(*args, **kwargs)
    first = next(iter(dataset))
    if "input_ids" in first or (formatting_func is None and _is_conversation(first)):
        return wrapped(*args, **kwargs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "processing_class", _ending(tokenizer))
    return wrapped(*args, **kwargs)


def _is_conversation(row: dict[str, Any]) -> bool:
    from trl import data_utils

    # 0.15.0 takes no conversations of the older form.
    return bool(data_utils.is_conversational(getattr(data_utils, "maybe_convert_to_chatml", dict)(row)))


def _ending(tokenizer: Any, code: str = "") -> Any:
    """Return a view of ``tokenizer`` that ends what it returns with the end-of-sequence token.

    The view is pickled as a call of this function: for worker processes, and for the cache key of ``datasets``.
    ``code`` is a digest of this file. It is unused except that it changes that key when the file changes.
    """
    import wrapt

    last = {"input_ids": tokenizer.eos_token_id, "attention_mask": 1}

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __reduce_ex__(self, protocol: Any) -> Any:
            digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
            return _ending, (self.__wrapped__, digest)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            encoded = self.__wrapped__(*args, **kwargs)
            if encoded["input_ids"][-1:] != [last["input_ids"]]:
                for name in list(encoded):
                    encoded[name] = [*encoded[name], last.get(name, 0)]
            return encoded

    return View(tokenizer)


def texts_end_once(module: ModuleType) -> Outcome:
    """Count the ends of texts, of which one has an end, and compare what is tokenised of other datasets."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release puts the token between texts that it packs, and leaves other ends to the user")
    texts, right = ["ab", "c", "ab\1", "\1d"], ["ab\1", "c\1", "ab\1", "\1d\1"]
    if hasattr(module, "pack_dataset"):
        rows = sft_prepared(module, [{"text": text} for text in texts], CharacterTokenizer(), dataset_text_field="text")
        found = [CharacterTokenizer().decode(row["input_ids"]) for row in rows]
        if found != right:
            raise AssertionError(f"the texts are {found}")
        return absent("this release ends the texts")
    found = _texts(module, [{"text": text} for text in texts])
    counts = [sum(text.count("\1") for text in rows) for rows in (found, right, texts)]
    outcome = judge(counts[0], right=counts[1], wrong=counts[2], texts=found)
    if outcome.verdict is Verdict.FIXED:
        mistakes = [f"the texts are {found}"] * (found != right)
        if mistakes := [*mistakes, *_mistakes_elsewhere(module, texts, right), *_mistakes_of_the_wrapper()]:
            raise AssertionError("; ".join(mistakes))
    return outcome


class _Typed(CharacterTokenizer):
    """A tokenizer that returns ``token_type_ids``, too."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        encoded = super().__call__(text)
        encoded["token_type_ids"] = [0] * len(text)
        return encoded


def _texts(module: ModuleType, rows: list[dict[str, Any]], function: Any = None, **settings: Any) -> list[str]:
    """Return what is tokenised of each row."""
    tokenizer, settings = _Typed(), {"dataset_text_field": "text", **settings}
    texts = []
    for row in sft_prepared(module, rows, tokenizer, function, **settings):
        lengths = {len(row[name]) for name in ("input_ids", "attention_mask", "token_type_ids") if name in row}
        if len(lengths) != 1 or {*row.get("attention_mask", [1])} != {1} or any(row.get("token_type_ids", [])):
            raise AssertionError(f"the ids and masks of a row do not fit: {row}")
        texts.append(tokenizer.decode(row["input_ids"]))
    return texts


def _mistakes_elsewhere(module: ModuleType, texts: list[str], right: list[str]) -> list[str]:
    """Return what is wrong with other columns, and with conversations, whose template has the last word."""
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    tokenised = {
        "content": _texts(module, [{"content": text} for text in texts], dataset_text_field="content"),
        "formatted": _texts(module, [{"question": text} for text in texts], lambda row: row["question"]),
        "pairs": _texts(module, [{"prompt": "z", "completion": text} for text in texts]),
        "nothing": _texts(module, [{"text": ""}]),
        "messages": _texts(module, [{"messages": messages}]),
    }
    expected = {**dict.fromkeys(tokenised, right), "pairs": [f"z{text}" for text in right]}
    expected |= {"nothing": ["\1"], "messages": ["uab\1ac\1"]}
    return [f"of {name}, {tokenised[name]} are tokenised" for name in expected if tokenised[name] != expected[name]]


def _mistakes_of_the_wrapper() -> list[str]:
    """Return which tokenizers are replaced that are to stay, and which stay that are not."""
    import pickle

    message, text, tokenizer = {"role": "user", "content": "ab"}, {"text": "ab"}, CharacterTokenizer()
    without_end: Any = CharacterTokenizer()
    without_end.eos_token_id = None
    cases: dict[str, tuple[Any, Any, Any, bool]] = {
        "a text": (_dataset(text), tokenizer, None, True),
        "a formatted conversation": (_dataset({"messages": [message]}), tokenizer, str, True),
        "a conversation": (_dataset({"messages": [message]}), tokenizer, None, False),
        "tokens": (_dataset({**text, "input_ids": [97]}), tokenizer, None, False),
        "formatted tokens": (_dataset({**text, "input_ids": [97]}), tokenizer, str, False),
        "no dataset": ([text], tokenizer, None, False),
        "no end": (_dataset(text), without_end, None, False),
        "a processor": (_dataset(text), SimpleNamespace(tokenizer=tokenizer), None, False),
    }
    mistakes = []
    for name, (dataset, words, function, is_replaced) in cases.items():
        passed = end_what_is_tokenised(_tokenizer, None, (dataset, words), {"formatting_func": function})
        if (passed is not words) != is_replaced:
            mistakes.append(f"{name}: the tokenizer is {passed}")
    again = pickle.loads(pickle.dumps(_ending(tokenizer)))
    if again("a")["input_ids"] != [97, 1] or type(again.__wrapped__) is not CharacterTokenizer:
        mistakes.append("in another process the texts have no end")
    if _ending(tokenizer).__reduce_ex__(2)[1][1] in ("", None) or tokenizer("a")["input_ids"] != [97]:
        mistakes.append("the digest is empty, or the user's tokenizer is changed")
    return mistakes


def _dataset(row: dict[str, Any]) -> Any:
    """Return a dataset that can be iterated and nothing else. A real one takes milliseconds to make."""
    from datasets import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __iter__(self) -> Any:
            return iter([row])

    return Rows()


def _tokenizer(dataset: Any, processing_class: Any, formatting_func: Any) -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrapper reads, and return the tokenizer."""
    return processing_class
