"""The facts of the training dataset that a trainer was given, by the names of ``catalogue.facts``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..catalogue.conditions import Argument
from ..matching.model_configs import known, unknown
from ..patching import given
from ..patching.given_datasets import TEXT, GivenDataset
from .models_within import tokenizer_of

_SOURCE = "train_dataset"
_CONVERSATIONS = ("prompt", "chosen", "rejected", "completion", "messages")
_SHAREGPT = ("conversations", "messages", "prompt", "completion")
_SHAREGPT_ROLES = {"human", "gpt"}


def dataset_fact(trainer: Any, name: str) -> Argument:
    """Return a fact of the training dataset. Raises ``KeyError`` for another name."""
    dataset = given.dataset_of(trainer)
    if dataset is None:
        return unknown("the columns of the training dataset are not known")
    return _FACTS[name](trainer, dataset)


def _has(*columns: str) -> Callable[[Any, GivenDataset], Argument]:
    return lambda trainer, dataset: known(all(column in dataset.columns for column in columns), _SOURCE)


def _columns(trainer: Any, dataset: GivenDataset) -> Argument:
    return known(list(dataset.columns), _SOURCE)


def _rows(trainer: Any, dataset: GivenDataset) -> Argument:
    return known(dataset.rows, _SOURCE) if dataset.rows is not None else unknown("the training dataset is a stream")


def _images(trainer: Any, dataset: GivenDataset) -> Argument:
    return known("image" in dataset.columns or "images" in dataset.columns, _SOURCE)


def _named_text_column(trainer: Any, dataset: GivenDataset) -> Argument:
    return known(trainer.args.dataset_text_field in dataset.columns, _SOURCE)


def _conversational(trainer: Any, dataset: GivenDataset) -> Argument:
    names = [name for name in _CONVERSATIONS if name in dataset.columns]
    of_texts = getattr(trainer.args, "dataset_text_field", "text")
    kinds = [dataset.types.get(name) for name in names or ([of_texts] if of_texts in dataset.columns else [])]
    if kinds and all(kind == TEXT for kind in kinds):
        return known(False, _SOURCE)
    of_messages = [kind for kind in kinds if kind != TEXT]
    # A prompt of texts with a completion of messages is neither.
    if kinds and len(of_messages) == len(kinds) and all({"role", "content"} <= {*(kind or ())} for kind in of_messages):
        return known(True, _SOURCE)
    return unknown("the training dataset has columns of several kinds, or of none that TRL reads")


def _sharegpt_roles(trainer: Any, dataset: GivenDataset) -> Argument:
    present = [name for name in _SHAREGPT if name in dataset.columns]
    if all(name in dataset.types and not {"from", "value"} <= {*dataset.types[name]} for name in present):
        return known(False, _SOURCE)
    if not any(_SHAREGPT_ROLES & {*dataset.roles.get(name, ())} for name in present):
        return unknown("the first row of the training dataset does not have the roles human and gpt")
    template = tokenizer_of(trainer).chat_template
    if not isinstance(template, str) or any(role in template for role in _SHAREGPT_ROLES):
        return unknown("the chat template may know the roles human and gpt")
    return known(True, _SOURCE)


def _prefilled(trainer: Any, dataset: GivenDataset) -> Argument:
    if dataset.types.get("prompt") == TEXT:
        return known(False, _SOURCE)
    if dataset.roles.get("prompt", ())[-1:] == ("assistant",):
        return known(True, _SOURCE)
    return unknown("the first prompt does not end with a message of the assistant")


def _any_text_has_bos(trainer: Any, dataset: GivenDataset) -> Argument:
    return unknown("the texts of the training dataset are not read")


def _plain_text_has_bos(trainer: Any, dataset: GivenDataset) -> Argument:
    is_conversational = _conversational(trainer, dataset).value
    return known(False, _SOURCE) if is_conversational else _any_text_has_bos(trainer, dataset)


def _no_prefix(trainer: Any, dataset: GivenDataset) -> Argument:
    # Of preferences, the prompt may be the beginning of both.
    if not {"prompt", "chosen"} & {*dataset.columns}:
        return known(False, _SOURCE)
    return unknown("the texts of the training dataset are not read")


_FACTS: Mapping[str, Callable[[Any, GivenDataset], Argument]] = {
    "columns": _columns,
    "rows": _rows,
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
