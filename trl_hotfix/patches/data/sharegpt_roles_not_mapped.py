"""SFT gives the chat template the roles ``human`` and ``gpt`` of ShareGPT's conversations, which templates do not know.

``maybe_convert_to_chatml`` (0.15.1, pull request 2862) renames the keys ``from`` and ``value`` of a message, and keeps
the role. The wrapper renames the roles before, where it knows the chat template too: one that asks for ``human`` or
``gpt`` itself is left alone, and so are the rows that a ``formatting_func`` is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, prepared_first, wrapper
from ...model import Outcome, Verdict
from ...testing import CharacterTokenizer, sft_prepared, stream

_ROLES = MappingProxyType({"human": "user", "gpt": "assistant"})
_COLUMNS = "conversations", "messages", "prompt", "completion"
"""The columns whose messages TRL converts, and trains on."""


@wrapper
def name_the_roles(call: Call) -> Any:
    """Rename the roles of a dataset whose first row has one of ShareGPT's, and call the method with this dataset."""
    from datasets import Dataset, IterableDataset
    from trl.trainer import sft_trainer as module

    dataset, processing_class, settings, formatting_func, dataset_name = (
        call[name] for name in ("dataset", "processing_class", "args", "formatting_func", "dataset_name")
    )
    if formatting_func is not None or not isinstance(dataset, (Dataset, IterableDataset)):
        return call()
    first = next(iter(dataset))
    columns = [name for name in _COLUMNS if name in first and _renamed(first[name]) != first[name]]
    if not columns or "input_ids" in first or _asks_for_them(processing_class):
        return call()

    def with_roles(example: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _renamed(example[name]) for name in columns}

    dataset = prepared_first(module, dataset, with_roles, settings, f"Naming the roles of {dataset_name} dataset")
    return call.with_(dataset=dataset)()


def _renamed(messages: Any) -> Any:
    """Return the messages with TRL's names for ShareGPT's roles. What has no ``from`` stays as it is."""
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "from": _ROLES[message["from"]]}
        if isinstance(message, Mapping) and message.get("from") in _ROLES
        else message
        for message in messages
    ]


def _asks_for_them(processing_class: Any) -> bool:
    """Return whether the chat template, of a tokenizer or of a processor with one, names a role of ShareGPT."""
    holders = processing_class, getattr(processing_class, "tokenizer", None)
    templates = "".join(str(getattr(holder, "chat_template", None)) for holder in holders)
    return re.search(r"""(['"])(human|gpt)\1""", templates) is not None


def templates_know_the_roles(module: ModuleType) -> Outcome:
    """Check the roles that the chat template is given of conversations of several lengths, with other roles among them.

    The template writes the first letter of a role. Datasets that have no such roles, or whose template asks for them,
    must be handed on as they are.
    """
    if not hasattr(module, "maybe_convert_to_chatml"):
        return absent("this release knows no conversations of 'from' and 'value'")
    conversations = [
        [("human", "ab"), ("gpt", "c")],
        [("system", "d"), ("human", "e"), ("gpt", "fg"), ("human", "h"), ("gpt", "i")],
        [("user", "j"), ("gpt", "k"), ("tool", "l")],
    ]
    rows = [{"conversations": _messages(turns), "number": number} for number, turns in enumerate(conversations)]
    texts = _texts(module, rows)
    if texts == ["hab\1gc\1", "sd\1he\1gfg\1hh\1gi\1", "uj\1gk\1tl\1"]:
        return Outcome(Verdict.REPRODUCED, {"texts": texts})
    right = ["uab\1ac\1", "sd\1ue\1afg\1uh\1ai\1", "uj\1ak\1tl\1"]
    mistakes = _mistakes_elsewhere()
    if texts != right or _texts(module, rows[::-1]) != right[::-1]:
        mistakes.append(f"the texts are {texts}: expected {right}")
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return Outcome(Verdict.FIXED, {"texts": texts})


def _messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"from": role, "value": content} for role, content in turns]


def _texts(module: ModuleType, rows: list[dict[str, Any]]) -> list[str]:
    prepared = sft_prepared(module, rows, CharacterTokenizer())
    return ["".join(map(chr, example["input_ids"])) for example in prepared]


class _Words:
    """A tokenizer or a processor, as far as the wrapper looks at it."""

    def __init__(self, chat_template: Any = None, tokenizer: Any = None) -> None:
        self.chat_template, self.tokenizer = chat_template, tokenizer


def _handed_on(row: Any, words: Any = None, function: Any = None) -> Any:
    """Return the dataset that TRL's method is given, and the one that it was called with."""
    dataset = row if isinstance(row, list) else stream([row])
    settings = SimpleNamespace(dataset_num_proc=None)
    return name_the_roles(Call(_dataset, None, (dataset, words or _Words(), settings, function))), dataset


def _mistakes_elsewhere() -> list[str]:
    """Return what is wrong with datasets that are to stay, and with other columns than ``conversations``."""
    asked = _messages([("human", "ab"), ("gpt", "c")])
    row = {"conversations": asked}
    calls: dict[str, tuple[Any, Any, Any]] = {
        "roles of TRL": ({"conversations": _messages([("user", "ab"), ("assistant", "c")])}, None, None),
        "other keys": ({"messages": [{"role": "human", "content": "ab"}]}, None, None),
        "a text": ({"conversations": "human"}, None, None),
        "texts": ({"conversations": ["human", "gpt"]}, None, None),
        "another column": ({"chosen": asked}, None, None),
        "a formatting function": (row, None, str),
        "tokens": ({**row, "input_ids": [97]}, None, None),
        "no dataset": ([row], None, None),
        "a template for them": (row, _Words("{% if message['role'] == 'human' %}"), None),
        "a template for one": (row, _Words('{{ "gpt" }}'), None),
        "a processor for them": (row, _Words(tokenizer=_Words({"default": "['gpt']"})), None),
    }
    mistakes = []
    for name, (example, words, function) in calls.items():
        given, dataset = _handed_on(example, words, function)
        if given is not dataset:
            mistakes.append(f"{name}: the dataset is another one")
    renamed = _messages([("user", "ab"), ("assistant", "c")])
    for name in ("conversations", "messages", "prompt", "completion"):
        ((given,), _) = _handed_on({name: asked, "text": "human"}, _Words("a human's gpt: 'human\""))
        if given != {name: renamed, "text": "human"}:
            mistakes.append(f"of {name}, {given} is made")
    return mistakes


def _dataset(dataset: Any, processing_class: Any, args: Any, formatting_func: Any, dataset_name: str = "train") -> Any:
    """Have the arguments of ``_prepare_dataset`` that the wrapper reads, and return the first."""
    return dataset
