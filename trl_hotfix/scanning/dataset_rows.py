"""The rows of a dataset's file, in the forms that ``load_dataset`` reads: JSON Lines, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import REASON, ScriptError, plain, printable

_LARGEST_AT_ONCE = 1 << 26
"""A list in JSON is read at once."""

_LARGEST_UNPACKED = 1 << 30
_ROWS_AT_ONCE = 100

Row = Mapping[str, Any]


def rows(path: Path, file: str) -> Iterator[Row]:
    """Yield the rows. Raises ``ScriptError`` for what is no row, and ``OSError`` or ``UnicodeDecodeError``."""
    yield from _READERS.get(path.suffix.lower(), _json_lines)(path, file)


def _json_lines(path: Path, file: str) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(_parsed(line, f"{file}, line {number}"), f"{file}, line {number}")


def _json(path: Path, file: str) -> Iterator[Row]:
    with path.open(encoding="utf-8") as opened:
        is_list = opened.read(1000).lstrip().startswith("[")
    if not is_list:
        yield from _json_lines(path, file)
        return
    if path.stat().st_size > _LARGEST_AT_ONCE:
        limit = f"{_LARGEST_AT_ONCE >> 20} MiB"
        raise ScriptError(f"--dataset: {file} is a list of more than {limit}: expected JSON Lines, a row in each line")
    for number, row in enumerate(_parsed(path.read_text(encoding="utf-8"), file), 1):
        yield _row(row, f"{file}, row {number}")


def _csv(path: Path, file: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    expected = f"expected {len(reader.fieldnames or ())} values, as in its first line"
                    raise ScriptError(f"--dataset: {file}, line {reader.line_num}: {expected}")
                yield {name: _cell(value) for name, value in row.items()}
        except csv.Error as error:
            raise ScriptError(f"--dataset: {file}, line {reader.line_num} is not CSV: {plain(str(error))}") from None


def _cell(text: str) -> Any:
    """Return the value of a cell: ``datasets`` reads a column of numbers as numbers."""
    try:
        return float(text) if text else None
    except ValueError:
        return text


def _parquet(path: Path, file: str) -> Iterator[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise ScriptError(f"--dataset: {file} needs pyarrow to be read; expected it installed, or JSON Lines") from None
    # Errors of pyarrow are a ValueError or an OSError too.
    try:
        opened = parquet.ParquetFile(path)
        groups = opened.metadata
        if sum(groups.row_group(index).total_byte_size for index in range(groups.num_row_groups)) > _LARGEST_UNPACKED:
            raise ScriptError(f"--dataset: {file} has more than {_LARGEST_UNPACKED >> 20} MiB: expected fewer rows")
        for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        why = printable(str(error), REASON)
        raise ScriptError(f"--dataset: {file} is not Parquet: {why}") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"--dataset: {where} is not JSON: {plain(str(error))}") from None


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ScriptError(f"--dataset: {where}: expected an object with a value for each column")
    return row


_READERS: Mapping[str, Callable[[Path, str], Iterator[Row]]] = {".json": _json, ".csv": _csv, ".parquet": _parquet}
