"""What words such as ``trainer.beta=0.2`` make of a config: those of Hydra, and of ``OmegaConf.from_cli()``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import plain
from .argparse_words import MOST_WORDS, PLACE
from .parser_texts import UnclearError
from .settings_files import MISSING, Keys, Settings, is_scalar, scalar_of

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2})(?P<key>[^=]*)=(?P<value>.*)", re.DOTALL)
_INT = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[+-]?((0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|(0|[1-9][0-9]*)(?=[eE]))([eE][+-]?[0-9]+)?")
_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_KEYWORDS = {"true": True, "false": False, "null": None, "inf": float("inf"), "nan": float("nan")}
_LONGEST = 100
_OF_JOB = frozenset(["hydra.job.chdir", "hydra.job.name", "hydra.output_subdir", "hydra.run.dir", "hydra.verbose"])
"""Keys of Hydra itself that leave the config as it is."""


class RefusedError(Exception):
    """The script ends here, with this message."""


def of_hydra(settings: Settings, words: Sequence[str], folder: Path) -> Settings:
    """Apply the words of a Hydra script. ``folder``: that of its configs. Raises ``UnclearError``, ``RefusedError``."""
    made = _copy(settings, words)
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if match is None or _PATH.fullmatch(match["key"]) is None or match["key"].split(".")[0] == "hydra":
            if match is None or match["key"] not in _OF_JOB:
                raise UnclearError(f"{plain(word)} is not read")
            continue
        path = tuple(match["key"].split("."))
        if os.path.isdir(folder.joinpath(*path)):  # noqa: PTH112
            # `pathlib` raises for a name that is too long.
            raise UnclearError(f"{plain(word)} may choose a file of {path[-1]}")
        value = _value(match["value"], word)
        owner = _owner(made, path, word, may_add=bool(match["sign"]))
        old = owner.get(path[-1], ...)
        if not match["sign"] and old is ...:
            raise RefusedError(f"could not override {match['key']}: it is not in {settings.file}")
        if match["sign"] == "+" and old is not ... and old is not None and old != MISSING:
            raise RefusedError(f"could not add {match['key']}: it is in {settings.file}")
        _set(made, owner, path, value, word)
    return made


def of_omegaconf(settings: Settings, words: Sequence[str]) -> Settings:
    """Merge what ``OmegaConf.from_cli()`` returns into a config. Raises ``UnclearError``."""
    made = _copy(settings, words)
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or _PATH.fullmatch(key) is None:
            raise UnclearError(f"{plain(word)} is not read")
        path = tuple(key.split("."))
        _set(made, _owner(made, path, word, may_add=True), path, scalar_of(text), word)
    return made


def _copy(settings: Settings, words: Sequence[str]) -> Settings:
    if len(words) > MOST_WORDS:
        raise UnclearError(f"the command line has more than {MOST_WORDS} words")
    return settings._replace(values=_unshared(settings.values), places=dict(settings.places))


def _unshared(value: Any) -> Any:
    """Copy a value. What an anchor of YAML shares is one value for each alias then, as in OmegaConf."""
    return {key: _unshared(part) for key, part in value.items()} if isinstance(value, dict) else value


def _owner(settings: Settings, path: Keys, word: str, *, may_add: bool) -> dict[str, Any]:
    """Return the mapping that has the last key of a path, or will have it."""
    owner = settings.values
    for key in path[:-1]:
        if key not in owner and not may_add:
            raise RefusedError(f"could not override {'.'.join(path)}: {key} is not in {settings.file}")
        inner = owner.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UnclearError(f"{plain(word)} sets a part of what is no mapping")
        owner = inner
    return owner


def _set(settings: Settings, owner: dict[str, Any], path: Keys, value: Any, word: str) -> None:
    if not is_scalar(owner.get(path[-1])):
        raise UnclearError(f"{plain(word)} replaces more than one value")
    owner[path[-1]] = value
    settings.places[path] = PLACE


def _value(text: str, word: str) -> Any:
    """Return the value that Hydra reads. Its grammar is not that of YAML: ``yes`` is a text."""
    if text.lower() in _KEYWORDS:
        return _KEYWORDS[text.lower()]
    if _INT.fullmatch(text) and len(text) < _LONGEST:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _TEXT.fullmatch(text):
        return text
    raise UnclearError(f"{plain(word)} is not read")
