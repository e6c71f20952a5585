"""Accepted findings of a project: ``ignore`` of ``[tool.trl-hotfix]`` in the nearest pyproject.toml.

Each has a reason and a date of review. After that day the acceptance is itself a finding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ScriptError, plain, quoted, reason
from . import told_files
from .ignores import Ignore, present_id

FILE = "pyproject.toml"
_LARGEST = 1 << 20
_MOST = 1_000
_TABLE = "tool.trl-hotfix"
_KEYS = frozenset(["id", "reason", "review_by"])
_EXPECTED = '{id = "...", reason = "...", review_by = "2027-03-01"}'


def nearest(folder: Path) -> Path | None:
    """Return the pyproject.toml of this folder, or of the nearest one above it within the repository, with our table.

    A pyproject.toml without ``[tool.trl-hotfix]`` is of a part of the project, and the next one counts.
    """
    for parent in (folder, *folder.parents):
        file = parent / FILE
        if file.is_file() and _TABLE.encode() in told_files.read(file, _LARGEST, "a pyproject.toml"):
            return file
        if (parent / ".git").exists():
            return None
    return None


def ignores_of(file: Path, known: Mapping[str, str]) -> list[Ignore]:
    """Return what the table of a pyproject.toml accepts. Raises ``ScriptError`` with the file and the line.

    ``known`` has the present id of each bug by its present and former names.
    """
    here = Path.cwd()
    # An annotation of a pull request names a file from the top of the checkout.
    shown = plain(str(file.relative_to(here) if file.is_relative_to(here) else file))
    text = told_files.read_text(file, _LARGEST, "a pyproject.toml")
    table = _table(text, shown)
    unknown = sorted(table.keys() - {"ignore"})
    if unknown:
        place = f"{shown}, line {_line_of(text, unknown[0])}"
        raise ScriptError(f"{place}: [{_TABLE}] has no setting {quoted(unknown[0])}; expected ignore")
    entries = table.get("ignore", [])
    if not isinstance(entries, list) or len(entries) > _MOST:
        place = f"{shown}, line {_line_of(text, 'ignore')}"
        raise ScriptError(f"{place}: ignore is no list of at most {_MOST} entries; expected [{_EXPECTED}]")
    return [_read(entry, text, shown, known) for entry in entries]


def _table(text: str, shown: str) -> Mapping[str, Any]:
    try:
        toml = import_module("tomllib")
    except ModuleNotFoundError:
        raise ScriptError(f"{shown} has [{_TABLE}], which needs Python 3.11; use comments or --ignore here") from None
    try:
        data = toml.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{shown} is no TOML: {reason(error)}") from None
    tool = data.get("tool")
    table = tool.get("trl-hotfix", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise ScriptError(f"{shown}: tool.trl-hotfix is no table; expected ignore = [{_EXPECTED}]")
    return table


def _read(entry: Any, text: str, shown: str, known: Mapping[str, str]) -> Ignore:
    name = entry.get("id") if isinstance(entry, dict) else None
    line = _line_of(text, name if isinstance(name, str) else "ignore")
    place = f"{shown}, line {line}"
    if not isinstance(entry, dict) or not isinstance(name, str):
        raise ScriptError(f"{place}: ignore: an entry has no id; expected {_EXPECTED}")
    unknown = sorted(map(str, entry.keys() - _KEYS))
    if unknown:
        raise ScriptError(f"{place}: ignore: {quoted(name)} has {quoted(unknown[0])}; expected {_EXPECTED}")
    why = entry.get("reason")
    if not isinstance(why, str) or not why.strip():
        raise ScriptError(f"{place}: ignore: the reason of {quoted(name)} is missing; expected {_EXPECTED}")
    day = _day(entry.get("review_by"))
    if day is None:
        raise ScriptError(f"{place}: ignore: {quoted(name)} needs the day of its review; expected {_EXPECTED}")
    return Ignore(present_id(name, known, place), plain(why.strip()), shown, line, f"line {line}", day)


def _day(value: Any) -> date | None:
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    try:
        return date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _line_of(text: str, name: str) -> int:
    """Return the line behind the head of our table that has a name. The parser of TOML keeps no lines."""
    lines = text.splitlines()
    head = next((number for number, line in enumerate(lines) if _TABLE in line), 0)
    word = re.compile(rf"(?<![\w/-]){re.escape(name)}(?![\w/-])")
    return next((number for number, line in enumerate(lines, 1) if number > head and word.search(line)), head + 1)
