"""The facts that a training dataset tells: a file with the rows that a trainer is given.

``catalogue`` names the facts. Nothing of ``datasets`` is imported, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..catalogue.conditions import Argument
from ..catalogue.facts import OF_DATASETS
from ..errors import ScriptError, plain
from ..matching.dataset_facts import TEXT, GivenDataset, Reader, dataset_fact
from .dataset_rows import rows as rows_of

_LARGEST = 1 << 28
_TEXT_FIELD = "text"


def dataset_facts(path: Path) -> dict[str, Argument]:
    """Return the facts of a dataset. Raises ``ScriptError`` if the file cannot be read.

    The column of texts is ``text``. What a template does with the roles of messages is not known.
    """
    dataset = _read(path)
    reader = Reader(_TEXT_FIELD, lambda: None, path.name)
    return {name: dataset_fact(name, dataset, reader) for name in OF_DATASETS}


def _read(path: Path) -> GivenDataset:
    file = plain(str(path))
    columns: dict[str, _Column] = {}
    rows = 0
    try:
        if not path.is_file():
            raise ScriptError(f"--dataset: {file} {'is no file' if path.exists() else 'is not there'}")
        if path.stat().st_size > _LARGEST:
            raise ScriptError(f"--dataset: {file} has more than {_LARGEST >> 20} MiB: expected a smaller dataset")
        for row in rows_of(path, file):
            for name, value in row.items():
                columns.setdefault(name, _Column(since=rows)).add(value)
            rows += 1
    except OSError as error:
        raise ScriptError(f"--dataset: {file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ScriptError(f"--dataset: {file} is not UTF-8: {plain(str(error))}") from None
    if not rows:
        raise ScriptError(f"--dataset: {file} has no rows")
    types = {name: kind for name, column in columns.items() if (kind := column.kind()) is not None}
    of_messages = {name: columns[name] for name, kind in types.items() if kind != TEXT}
    return GivenDataset(
        tuple(columns),
        types,
        {name: column.roles for name, column in of_messages.items() if column.since == 0},
        {name: frozenset(column.last_roles) for name, column in of_messages.items()},
    )


class _Column:
    """What the values of a column are: texts, lists of messages, or anything else. ``since`` is its first row."""

    def __init__(self, since: int) -> None:
        self.since = since
        self.roles: tuple[str, ...] = ()
        self.last_roles: set[str] = set()
        self._keys: set[str] = set()
        self._kinds: set[str] = set()
        self._is_first = True

    def add(self, value: Any) -> None:
        if isinstance(value, str):
            self._kinds.add(TEXT)
        elif isinstance(value, list) and all(isinstance(message, dict) for message in value):
            roles = tuple(_role(message) for message in value)
            self._kinds.add("messages")
            self._keys.update(key for message in value for key in message)
            self.last_roles.update(roles[-1:])
            if self._is_first:
                self.roles = roles
        elif value is not None:
            self._kinds.add("other")
        self._is_first = False

    def kind(self) -> str | tuple[str, ...] | None:
        """Return the text, or the keys of the messages, or None for anything else."""
        if self._kinds == {TEXT}:
            return TEXT
        return tuple(self._keys) if self._kinds == {"messages"} and self._keys else None


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role") or message.get("from")
    return role if isinstance(role, str) else ""
