"""SFT adds no end-of-sequence token to a text field that is not called ``text``.

Since 0.17.0 (pull request 3328) ``_prepare_dataset`` appends the end-of-sequence token before it tokenises, but only in
the column ``text``. 0.16 appended the token after tokenising, whatever the name of the column.

TRL 1.15.0 appends it in the column that ``dataset_text_field`` names. The wrapper does this before the call, for the
texts that do not end with it. With a ``formatting_func`` the bug is another one: that the column is tokenised at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, prepared_first, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, sft_prepared, stream


def end_the_texts(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append the end-of-sequence token in the column that is tokenised, and call the method with this dataset."""
    from trl.trainer import sft_trainer as module

    dataset, processing_class, settings, formatting_func = (
        argument(wrapped, args, kwargs, name) for name in ("dataset", "processing_class", "args", "formatting_func")
    )
    field = settings.dataset_text_field
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    eos_token = getattr(tokenizer, "eos_token", None)
    if field == "text" or eos_token is None or formatting_func is not None or not _is_text(module, dataset, field):
        return wrapped(*args, **kwargs)
    sample = next(iter(dataset))[field].removesuffix(eos_token) or "a"
    if tokenizer(sample)["input_ids"][-1:] == [tokenizer.eos_token_id]:
        return wrapped(*args, **kwargs)

    def with_eos(example: Mapping[str, Any]) -> dict[str, str]:
        text: str = example[field]
        return {field: text if text.endswith(eos_token) else text + eos_token}

    dataset_name = argument(wrapped, args, kwargs, "dataset_name")
    dataset = prepared_first(module, dataset, with_eos, settings, f"Adding EOS to {field} of {dataset_name} dataset")
    args, kwargs = replaced_argument(wrapped, args, kwargs, "dataset", dataset)
    return wrapped(*args, **kwargs)


def _is_text(module: ModuleType, dataset: Any, field: str) -> bool:
    """Return whether TRL will tokenise ``field``: a text in an example that is not of another kind."""
    from datasets import Dataset, IterableDataset

    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    first = next(iter(dataset))
    if "input_ids" in first or "prompt" in first or not isinstance(first.get(field), str):
        return False
    return not module.is_conversational(module.maybe_convert_to_chatml(first))


def texts_end(module: ModuleType) -> Outcome:
    """Check that a text in ``content`` gets an end-of-sequence token, as a text in ``text`` does."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release adds no end-of-sequence token")
    # One of the texts ends already.
    texts = ("ab", "c", "ab\1")
    ids = {field: _ids(module, texts, field) for field in ("text", "content")}
    ended, without = [[97, 98, 1], [99, 1], [97, 98, 1]], [[97, 98], [99], [97, 98, 1]]
    if ids["text"] != ended:
        return absent("this release adds no end-of-sequence token")
    if ids["content"] == without:
        return Outcome(Verdict.REPRODUCED, {"ids": ids})
    mistakes = _mistakes_elsewhere(module)
    if ids["content"] != ended or _ids(module, texts, "content") != ended:
        mistakes.append(f"the ids are {ids['content']}: expected {ended}")
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return Outcome(Verdict.FIXED, {"ids": ids})


def _ids(module: ModuleType, texts: tuple[str, ...], field: str) -> list[list[int]]:
    rows = [{field: text} for text in texts]
    return [
        example["input_ids"] for example in sft_prepared(module, rows, CharacterTokenizer(), dataset_text_field=field)
    ]


def _mistakes_elsewhere(module: ModuleType) -> list[str]:
    """Return what is wrong with datasets and tokenizers whose texts are to stay."""

    class EndingTokenizer(CharacterTokenizer):
        def __call__(self, text: str, **kwargs: Any) -> Any:
            return super().__call__(text + "\1", **kwargs)

    class StartingTokenizer(CharacterTokenizer):
        """It begins texts with the token that ends them."""

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return super().__call__("\1" + text, **kwargs)

    class UnknowingTokenizer(CharacterTokenizer):
        """It does not know the letter a, and its token for unknown letters is that of the end."""

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return super().__call__(text.replace("a", "\1"), **kwargs)

    without_end: Any = CharacterTokenizer()
    without_end.eos_token = None
    text, words = {"content": "ab"}, CharacterTokenizer()
    message = {"role": "user", "content": "ab"}
    calls: dict[str, tuple[dict[str, Any], Any, str, Any]] = {
        "a field called text": ({"text": "ab"}, words, "text", None),
        "no end of sequence": (text, without_end, "content", None),
        "a formatting function": (text, words, "content", str),
        "a tokenizer that ends the texts": (text, EndingTokenizer(), "content", None),
        "tokens": ({**text, "input_ids": [97]}, words, "content", None),
        "a pair": ({**text, "prompt": "ab"}, words, "content", None),
        "no text": ({"content": [97]}, words, "content", None),
        "a conversation": ({**text, "messages": [message]}, words, "content", None),
    }
    mistakes = []
    for name, (row, tokenizer, field, function) in calls.items():
        dataset, settings = stream([row]), SimpleNamespace(dataset_text_field=field)
        processor = SimpleNamespace(tokenizer=tokenizer)
        if end_the_texts(_dataset, None, (dataset, processor, settings, function), {}) is not dataset:
            mistakes.append(f"{name}: the dataset is another one")
    settings = SimpleNamespace(dataset_text_field="content")
    if end_the_texts(_dataset, None, (text, words, settings, None), {}) is not text:
        mistakes.append("what is no dataset is another one")
    for content, tokenizer in (("bc", UnknowingTokenizer()), ("", StartingTokenizer())):
        (row,) = end_the_texts(_dataset, None, (stream([{"content": content}]), tokenizer, settings, None), {})
        if row["content"] != content + "\1":
            mistakes.append(f"of {content!r} with {type(tokenizer).__name__}, {row} is made")
    return mistakes


def _dataset(dataset: Any, processing_class: Any, args: Any, formatting_func: Any, dataset_name: str = "train") -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrapper reads, and return the first."""
    return dataset
