"""SFT gives the chat template the roles ``human`` and ``gpt`` of ShareGPT's conversations, which templates do not know.

``maybe_convert_to_chatml`` (0.15.1, pull request 2862) renames the keys ``from`` and ``value`` of a message, and keeps
the role. The wrapper renames the roles before, where it knows the chat template too: one that asks for ``human`` or
``gpt`` itself is left alone, and so are the rows that a ``formatting_func`` is given.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType, ModuleType
from typing import Any

from ...authoring import Call, absent, judge, prepared_first, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, StopConstruction, default_arguments, single_process, stub_trainer

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
    """Return the messages with TRL's names for ShareGPT's roles. A message without ``from`` stays as it is."""
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
    """Count the messages of a conversation of two whose roles the chat template knows."""
    from datasets import IterableDataset

    if not hasattr(module, "maybe_convert_to_chatml"):
        return absent("this release knows no conversations of 'from' and 'value'")

    class Rows(IterableDataset):  # type: ignore[misc]
        """One row, which is mapped at once. A dataset of ``datasets`` takes 100 milliseconds for all maps."""

        column_names = property(lambda self: list(self.row))

        def __init__(self, row: dict[str, Any]) -> None:
            self.row = row

        def __iter__(self) -> Any:
            # TRL renames the keys in place.
            return iter([copy.deepcopy(self.row)])

        def map(self, function: Any, fn_kwargs: Any = MappingProxyType({}), **options: Any) -> Any:
            return Rows(*(function(row, **fn_kwargs) for row in self))

    given: list[list[dict[str, str]]] = []

    def render(messages: list[dict[str, str]], **options: Any) -> None:
        given.append(messages)
        raise StopConstruction

    rows = Rows({"conversations": [{"from": role, "value": "a"} for role in _ROLES]})
    tokenizer, args = CharacterTokenizer(), default_arguments(module.SFTConfig)
    vars(tokenizer)["apply_chat_template"] = render
    trainer = stub_trainer(module.SFTTrainer, args, chat_template=None, _is_vlm=False, _tokenizer=tokenizer)
    with single_process(module), suppress(StopConstruction):
        trainer._prepare_dataset(rows, tokenizer, args, False, None, "train")
    (messages,) = given
    return judge(sum(message["role"] in _ROLES.values() for message in messages), right=2, wrong=0)
