"""What a training dataset is, as it is given to a trainer, which replaces it by tokens: columns, types, first roles.

It reads no row through the dataset: that could run a transform of the program, decode an image or move on a stream. It
reads the roles of the first row from the table, and only of columns whose type is a list of messages.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..matching.dataset_facts import TEXT, GivenDataset


def described(dataset: Any) -> GivenDataset | None:
    """Return what ``dataset`` is, or None where its columns are not known without reading a row. It never raises."""
    try:
        return _described(dataset)
    # A library has these classes, and their attributes differ between its versions.
    except Exception:  # noqa: BLE001
        return None


def _described(dataset: Any) -> GivenDataset | None:
    datasets = sys.modules.get("datasets")
    if datasets is None:
        return None
    is_stream = isinstance(dataset, datasets.IterableDataset)
    features = dataset.features if is_stream or isinstance(dataset, datasets.Dataset) else None
    if features is None:
        return None
    columns = tuple(features)
    if is_stream:
        return GivenDataset(columns, _types(features), {})
    shown = dataset.format
    # A transform, and a choice of columns, show other rows than the table has.
    if shown["type"] == "custom" or set(shown["columns"] or columns) != set(columns):
        return None
    types = _types(features)
    of_messages = [name for name, kind in types.items() if kind != TEXT]
    roles = {name: _roles(_first(dataset, name)) for name in of_messages} if dataset.num_rows else {}
    return GivenDataset(columns, types, roles)


def _types(features: Mapping[str, Any]) -> dict[str, str | tuple[str, ...]]:
    types: dict[str, str | tuple[str, ...]] = {}
    for name, feature in features.items():
        if getattr(feature, "dtype", None) in ("string", "large_string"):
            types[name] = TEXT
            continue
        # A list of messages is [{...}] up to datasets 3, and List({...}) from 4 on. A Sequence of 3 is a dict of lists.
        is_list = type(feature).__name__ in ("List", "LargeList")
        message = feature[0] if isinstance(feature, list) and len(feature) == 1 else None
        message = feature.feature if is_list else message
        if isinstance(message, Mapping):
            types[name] = tuple(message)
    return types


def _first(dataset: Any, column: str) -> Any:
    """Return a column of the first row, as it is in the table."""
    indices = getattr(dataset, "_indices", None)
    row = indices.column(0)[0].as_py() if indices is not None else 0
    return dataset.data.column(column)[row].as_py()


def _roles(messages: Any) -> tuple[str, ...]:
    if not isinstance(messages, list):
        return ()
    roles = (message.get("role") or message.get("from") for message in messages if isinstance(message, Mapping))
    return tuple(role if isinstance(role, str) else "" for role in roles)
