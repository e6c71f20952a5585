"""SFT ends the text of a row and not its completion, if the row has both.

``add_eos`` in ``_prepare_dataset`` appends the end-of-sequence token to the column ``text``, and to ``completion`` only
if that column is not there (an ``elif``, of pull request 3328). What is tokenised is the prompt and the completion.
From 1.15.0 on the column is that of ``dataset_text_field``.

The wrapper ends the completions before the call. It leaves the text where it is, since a collator of the user's may
read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, prepared_first, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, sft_prepared, stream


def end_beside_text(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End the completions of rows that have a column ``text`` (0.17.0 to 1.14.2)."""
    return _end_beside("text", wrapped, args, kwargs)


def end_beside_text_field(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """End the completions of rows that have the column ``dataset_text_field`` (1.15.0 and later)."""
    return _end_beside(argument(wrapped, args, kwargs, "args").dataset_text_field, wrapped, args, kwargs)


def _end_beside(field: str, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End the completions of rows that have the column ``field``, and call the method with this dataset."""
    from trl.trainer import sft_trainer as module

    dataset, processing_class, settings, formatting_func = (
        argument(wrapped, args, kwargs, name) for name in ("dataset", "processing_class", "args", "formatting_func")
    )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    eos_token = tokenizer.eos_token
    if eos_token is None or formatting_func is not None or not _is_unended_pair(dataset, field, tokenizer):
        return wrapped(*args, **kwargs)

    def with_eos(example: Mapping[str, Any]) -> dict[str, str]:
        completion: str = example["completion"]
        return {"completion": completion if completion.endswith(eos_token) else completion + eos_token}

    name = argument(wrapped, args, kwargs, "dataset_name")
    dataset = prepared_first(module, dataset, with_eos, settings, f"Adding EOS to completions of {name} dataset")
    args, kwargs = replaced_argument(wrapped, args, kwargs, "dataset", dataset)
    return wrapped(*args, **kwargs)


def _is_unended_pair(dataset: Any, field: str, tokenizer: Any) -> bool:
    """Return whether the first row has ``field`` beside a prompt and a completion that the tokenizer does not end."""
    from datasets import Dataset, IterableDataset

    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    first = next(iter(dataset))
    if "input_ids" in first or field not in first or field == "completion":
        return False
    pair = first.get("prompt"), first.get("completion")
    if not all(isinstance(text, str) for text in pair):
        return False
    ids = tokenizer("".join(pair).removesuffix(tokenizer.eos_token))["input_ids"]
    return bool(ids[-1:] != [tokenizer.eos_token_id])


_FIELD = "content"
"""The ``dataset_text_field`` of the self-test's runs that have one of their own."""


def completions_end(module: ModuleType) -> Outcome:
    """Check that a completion gets an end-of-sequence token beside a text, as it does without one."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release adds no end-of-sequence token")
    # One of the completions ends already. So does one of the texts, and then TRL ends the completion.
    pairs = [{"prompt": "ab", "completion": text} for text in ("cd", "e", "f\1", "g")]
    with_texts = [{**pair, "text": text} for pair, text in zip(pairs, ("hi", "xyz", "j", "k\1"), strict=True)]
    ended = [[97, 98, 99, 100, 1], [97, 98, 101, 1], [97, 98, 102, 1], [97, 98, 103, 1]]
    prepared = sft_prepared(module, pairs, CharacterTokenizer(), dataset_text_field="text")
    if "completion" not in prepared[0]:
        return absent("this release makes one text of prompt and completion, and overwrites the column")
    if [row["input_ids"] for row in prepared] != ended:
        return absent("this release adds no end-of-sequence token to the completion")
    ids = _ids(module, with_texts)
    if ids == [ended[0][:-1], ended[1][:-1], *ended[2:]]:
        return Outcome(Verdict.REPRODUCED, {"ids": ids})
    mistakes = [] if ids == ended == _ids(module, with_texts) else [f"the ids are {ids}: expected {ended}"]
    mistakes += _mistakes_elsewhere(module, with_texts, ended)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return Outcome(Verdict.FIXED, {"ids": ids})


def _ids(module: ModuleType, rows: list[dict[str, Any]], **settings: Any) -> list[list[int]]:
    settings = {"dataset_text_field": "text", **settings}
    return [row["input_ids"] for row in sft_prepared(module, rows, CharacterTokenizer(), **settings)]


def _mistakes_elsewhere(module: ModuleType, with_texts: list[dict[str, Any]], ended: list[list[int]]) -> list[str]:
    """Return what is wrong with another text field, and with datasets and tokenizers whose completions are to stay."""

    class EndingTokenizer(CharacterTokenizer):
        def __call__(self, text: str, **kwargs: Any) -> Any:
            return super().__call__(text + "\1", **kwargs)

    without_end: Any = CharacterTokenizer()
    without_end.eos_token = None
    mistakes = []
    fields = [{**{name: row[name] for name in ("prompt", "completion")}, _FIELD: row["text"]} for row in with_texts]
    if (ids := _ids(module, fields, dataset_text_field=_FIELD)) != ended:
        mistakes.append(f"with the text field {_FIELD}, the ids are {ids}")
    words, row = CharacterTokenizer(), {**with_texts[0], _FIELD: "xy"}
    message = [{"role": "user", "content": "ab"}]
    processor = SimpleNamespace(tokenizer=EndingTokenizer())
    calls: dict[str, tuple[dict[str, Any], Any, Any]] = {
        "no end of sequence": (row, without_end, None),
        "a formatting function": (row, words, str),
        "a tokenizer that ends the texts": (row, processor, None),
        "tokens": ({**row, "input_ids": [97]}, words, None),
        "no text": ({"prompt": "a", "completion": "b"}, words, None),
        "no completion": ({"prompt": "a", "text": "b", _FIELD: "c"}, words, None),
        "no prompt": ({"completion": "a", "text": "b", _FIELD: "c"}, words, None),
        "a conversation": ({**row, "prompt": message, "completion": message}, words, None),
    }
    for wrapper, field in ((end_beside_text, "text"), (end_beside_text_field, _FIELD)):
        settings = SimpleNamespace(dataset_text_field=_FIELD, dataset_num_proc=None)
        for name, (example, tokenizer, function) in calls.items():
            dataset = _rows(example)
            if wrapper(_dataset, None, (dataset, tokenizer, settings, function), {}) is not dataset:
                mistakes.append(f"{name}: the dataset is another one")
        rows = [row]
        if wrapper(_dataset, None, (rows, words, settings, None), {}) is not rows:
            mistakes.append("what is no dataset is another one")
        only = {name: row[name] for name in ("prompt", "completion", field)}
        given = {"dataset": stream([only]), "processing_class": words, "args": settings, "formatting_func": None}
        if list(wrapper(_dataset, None, (), given)) != [{**only, "completion": "cd\1"}]:
            mistakes.append(f"beside {field}, the completion does not end")
        other = {"prompt": "a", "completion": "b", ({"text", _FIELD} - {field}).pop(): "c"}
        given["dataset"] = _rows(other)
        if wrapper(_dataset, None, (), given) is not given["dataset"]:
            mistakes.append(f"beside another column than {field}, the dataset is another one")
    settings.dataset_text_field = "completion"
    dataset = _rows(row)
    if end_beside_text_field(_dataset, None, (dataset, words, settings, None), {}) is not dataset:
        mistakes.append("where the completion is the text field, the dataset is another one")
    return mistakes


def _rows(row: dict[str, Any]) -> Any:
    """Return a dataset of one row that can be iterated and nothing else. A real one takes milliseconds to make."""
    from datasets import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __iter__(self) -> Any:
            return iter([row])

    return Rows()


def _dataset(dataset: Any, processing_class: Any, args: Any, formatting_func: Any, dataset_name: str = "train") -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrappers read, and return the first."""
    return dataset
