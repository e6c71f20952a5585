"""The facts of a training dataset, by its columns, their types and roles: of one that a trainer was given, or a file.

``catalogue.facts`` names the facts. ``source`` is where the dataset comes from, for the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from ..catalogue.conditions import Argument
from .model_configs import known, unknown

TEXT = "text"

_CONVERSATIONS = ("prompt", "chosen", "rejected", "completion", "messages")
_SHAREGPT = ("conversations", "messages", "prompt", "completion")
_SHAREGPT_ROLES = {"human", "gpt"}


class GivenDataset(Struct, frozen=True):
    """The columns of a dataset.

    ``types`` has, for a column of plain texts, ``TEXT``; for one of messages, the keys of a message. Other columns are
    not in it. ``roles`` has the roles of the messages in the first row, by ``role`` or ``from``, for each column of
    messages of a dataset that is no stream. ``last_roles`` has, by the column, the roles of the last messages of all
    rows, where all rows were read.
    """

    columns: tuple[str, ...]
    types: Mapping[str, str | tuple[str, ...]]
    roles: Mapping[str, tuple[str, ...]]
    last_roles: Mapping[str, frozenset[str]] = {}


class Reader(Struct, frozen=True):
    """What reads a dataset: ``dataset_text_field`` of the config, and how to find the template of its tokenizer."""

    text_field: str | None
    chat_template: Callable[[], Any]
    source: str


def dataset_fact(name: str, dataset: GivenDataset, reader: Reader) -> Argument:
    """Return a fact of a dataset. Raises ``KeyError`` for another name."""
    return _FACTS[name](dataset, reader)


def _has(*columns: str) -> Callable[[GivenDataset, Reader], Argument]:
    return lambda dataset, reader: known(all(column in dataset.columns for column in columns), reader.source)


def _columns(dataset: GivenDataset, reader: Reader) -> Argument:
    return known(list(dataset.columns), reader.source)


def _tokens_in_one_piece(dataset: GivenDataset, reader: Reader) -> Argument:
    # TRL writes the tokens that it makes itself, in pieces that are batches.
    if "input_ids" not in dataset.columns:
        return known(False, reader.source)
    return unknown("in which pieces the tokens of the training dataset lie is not read")


def _images(dataset: GivenDataset, reader: Reader) -> Argument:
    return known("image" in dataset.columns or "images" in dataset.columns, reader.source)


def _named_text_column(dataset: GivenDataset, reader: Reader) -> Argument:
    return known(reader.text_field in dataset.columns, reader.source)


def _conversational(dataset: GivenDataset, reader: Reader) -> Argument:
    names = [name for name in _CONVERSATIONS if name in dataset.columns]
    of_texts = [reader.text_field] if reader.text_field in dataset.columns else []
    kinds = [dataset.types.get(name) for name in names or of_texts]
    if kinds and all(kind == TEXT for kind in kinds):
        return known(False, reader.source)
    of_messages = [kind for kind in kinds if kind != TEXT]
    # A prompt of texts with a completion of messages is neither.
    if kinds and len(of_messages) == len(kinds) and all({"role", "content"} <= {*(kind or ())} for kind in of_messages):
        return known(True, reader.source)
    return unknown("the training dataset has columns of several kinds, or of none that TRL reads")


def _sharegpt_roles(dataset: GivenDataset, reader: Reader) -> Argument:
    present = [name for name in _SHAREGPT if name in dataset.columns]
    if all(name in dataset.types and not {"from", "value"} <= {*dataset.types[name]} for name in present):
        return known(False, reader.source)
    if not any(_SHAREGPT_ROLES & {*dataset.roles.get(name, ())} for name in present):
        return unknown("the first row of the training dataset does not have the roles human and gpt")
    template = reader.chat_template()
    if not isinstance(template, str) or any(role in template for role in _SHAREGPT_ROLES):
        return unknown("the chat template may know the roles human and gpt")
    return known(True, reader.source)


def _prefilled(dataset: GivenDataset, reader: Reader) -> Argument:
    if dataset.types.get("prompt") == TEXT:
        return known(False, reader.source)
    if dataset.roles.get("prompt", ())[-1:] == ("assistant",):
        return known(True, reader.source)
    if "prompt" in dataset.last_roles:
        return known("assistant" in dataset.last_roles["prompt"], reader.source)
    return unknown("the first prompt does not end with a message of the assistant")


def _any_text_has_bos(dataset: GivenDataset, reader: Reader) -> Argument:
    return unknown("the texts of the training dataset are not read")


def _plain_text_has_bos(dataset: GivenDataset, reader: Reader) -> Argument:
    is_conversational = _conversational(dataset, reader).value
    return known(False, reader.source) if is_conversational else _any_text_has_bos(dataset, reader)


def _no_prefix(dataset: GivenDataset, reader: Reader) -> Argument:
    # Of preferences, the prompt may be the beginning of both.
    if not {"prompt", "chosen"} & {*dataset.columns}:
        return known(False, reader.source)
    return unknown("the texts of the training dataset are not read")


_FACTS: Mapping[str, Callable[[GivenDataset, Reader], Argument]] = {
    "columns": _columns,
    "tokens_in_one_piece": _tokens_in_one_piece,
    "conversational": _conversational,
    "images": _images,
    "pairs": _has("chosen", "rejected"),
    "prompt_completion": _has("prompt", "completion"),
    "text_column": _has("text"),
    "named_text_column": _named_text_column,
    "sharegpt_roles": _sharegpt_roles,
    "any_text_has_bos": _any_text_has_bos,
    "plain_text_has_bos": _plain_text_has_bos,
    "no_prefix": _no_prefix,
    "prefilled": _prefilled,
}
"""The facts by their names."""
