"""The versions that a project is pinned to: requirements, lock files, environments of conda, and what pip prints.

Files are read, and nothing is resolved: a version counts only if the file names it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ..errors import ScriptError, plain, reason
from ..matching.versions import is_version
from . import json_files, told_files, yaml_files

LARGEST = 1 << 22
_MOST_LINES = 100_000
_MOST_PINS = 10_000
"""The largest size of a file in bytes, in lines and in pins; a large lock file has a megabyte, and a thousand pins."""

_EXPECTED = "pinned versions: requirements.txt, `pip freeze`, uv.lock, pylock.toml, poetry.lock or environment.yml"

_YAML = (".yml", ".yaml")
_LOCK_ENTRY = re.compile(r'^(name|version)\s*=\s*"([^"]*)"')
_TRL = re.compile(r"(?<![\w./-])trl(?![\w./-])", re.IGNORECASE)
_CONDA = re.compile(r"([\w.\-]+)\s*={1,2}\s*([\w.+!\-]+)")


def read_pins(path: Path) -> dict[str, str]:
    """Return the pinned versions by canonical name. Raises ``ScriptError`` if the file cannot be read as any of these.

    What is pinned to several versions, as for several platforms, is left out.

    ``requirements.txt`` and ``pip freeze``; ``uv.lock``, ``pylock.toml``, ``poetry.lock`` and ``pdm.lock``;
    ``environment.yml``; ``Pipfile.lock``, ``pip list --format json`` and ``pip inspect``.
    """
    file = plain(str(path))
    text = told_files.read_text(path, yaml_files.LARGEST if path.suffix in _YAML else LARGEST, _EXPECTED)
    try:
        if text.count("\n") > _MOST_LINES:
            raise ValueError(f"it is too large: it has more than {_MOST_LINES} lines")
        pairs = list(itertools.islice(_pairs(path, text, file), _MOST_PINS + 1))
        if len(pairs) > _MOST_PINS:
            raise ValueError(f"it is too large: it has more than {_MOST_PINS} pins")
    except ScriptError:
        raise
    # A file of another shape has a number in the place of a list, or no name in the place of a package.
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ScriptError(f"{file} is no file of pinned versions: {reason(error)}; expected {_EXPECTED}") from None
    pins: dict[str, dict[Version, str]] = {}
    for name, version in pairs:
        if is_version(version):
            pins.setdefault(canonicalize_name(name), {})[Version(version)] = version
    return {name: next(iter(one.values())) for name, one in pins.items() if len(one) == 1}


def line_of_trl(path: Path) -> int:
    """Return the line at which the file names TRL, or the first one. ``read_pins`` has read the file before."""
    try:
        lines = told_files.read_text(path, LARGEST, _EXPECTED).splitlines()
    except ScriptError:
        # What a pipe has given once it does not give again.
        return 1
    return next((number for number, line in enumerate(lines, 1) if _TRL.search(line)), 1)


def _pairs(path: Path, text: str, file: str) -> Iterator[tuple[str, str]]:
    if path.suffix in (".lock", ".toml") and not text.lstrip().startswith("{"):
        return _of_lock(text)
    if path.suffix in _YAML:
        return _of_environment(yaml_files.load(text, file, _EXPECTED)[1])
    if text.lstrip().startswith(("{", "[")):
        return _of_json(json_files.parse(text.encode()))
    return _of_requirements(text)


def _of_lock(text: str) -> Iterator[tuple[str, str]]:
    """Read ``[[package]]`` of uv, Poetry and PDM, and ``[[packages]]`` of PEP 751."""
    entry: dict[str, str] | None = None
    for line in [*text.splitlines(), "["]:
        if line.startswith("["):
            if entry is not None and len(entry) == 2:
                yield entry["name"], entry["version"]
            entry = {} if line.strip() in ("[[package]]", "[[packages]]") else None
        elif entry is not None:
            matched = _LOCK_ENTRY.match(line)
            if matched is not None:
                entry[matched[1]] = matched[2]


def _of_environment(environment: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(environment, dict) or not isinstance(environment.get("dependencies"), list):
        raise ValueError("it has no 'dependencies', as an environment of conda has")
    for dependency in environment["dependencies"]:
        if isinstance(dependency, dict):
            yield from _of_requirements("\n".join(map(str, dependency.get("pip") or ())))
        else:
            matched = _CONDA.match(str(dependency).rpartition("::")[2])
            if matched is not None:
                yield matched[1], matched[2]


def _of_json(data: Any) -> Iterator[tuple[str, str]]:
    if isinstance(data, dict) and "installed" in data:
        return ((entry["metadata"]["name"], entry["metadata"]["version"]) for entry in data["installed"])
    if isinstance(data, list):
        return ((entry["name"], entry["version"]) for entry in data)
    if isinstance(data, dict) and "default" in data:
        return ((name, str(entry.get("version", "")).removeprefix("==")) for name, entry in data["default"].items())
    raise ValueError("it is neither Pipfile.lock nor what `pip list --format json` or `pip inspect` prints")


def _of_requirements(text: str) -> Iterator[tuple[str, str]]:
    tried = 0
    for line in _joined(text.splitlines()):
        # Its marker decides nothing here, and may take longer to parse than a thousand pins.
        words = line.partition(" #")[0].partition(" --hash")[0].partition(";")[0].strip()
        # What has no such sign is not parsed either: a file may have a million lines.
        if words.startswith(("#", "-")) or "==" not in words:
            continue
        tried += 1
        if tried > _MOST_PINS:
            raise ValueError(f"it is too large: it has more than {_MOST_PINS} pins")
        try:
            requirement = Requirement(words)
        # A number of thousands of digits is no InvalidRequirement, and neither is one of thousands of brackets.
        except (ValueError, RecursionError):
            continue
        pinned = [item.version for item in requirement.specifier if item.operator in ("==", "===")]
        if len(pinned) == 1:
            yield requirement.name, pinned[0]


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Join lines that end with a backslash."""
    begun: list[str] = []
    for line in lines:
        if line.rstrip().endswith("\\"):
            begun.append(line.rstrip()[:-1])
        else:
            yield " ".join([*begun, line])
            begun = []
    if begun:
        yield " ".join(begun)
