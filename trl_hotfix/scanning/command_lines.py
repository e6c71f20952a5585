"""The command line of a script whose parser is transformers' ``HfArgumentParser`` or TRL's ``TrlParser``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ScriptError, plain
from . import told_files, yaml_files

_EXPECTED = "the config of a command line (--config), a mapping such as 'packing: true'"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments that a script is started with, by their names with underscores, and the words that set them."""

    values: Mapping[str, Any]

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """Parse ``--beta 0.1 --packing --no_bf16 --config c.yaml``. Raises ``ScriptError``.

        What the command line says comes before what the config says.
        """
        values: dict[str, Any] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                name, equals, text = word[2:].partition("=")
                name = name.replace("-", "_")
                values[name] = _value(text) if equals else None
            elif not name:
                raise ScriptError(f"expected options such as --beta 0.1 behind --, found {plain(word)}")
            else:
                values[name] = _joined(values[name], _value(word))
        config = values.pop("config", None)
        values = {name: True if value is None else value for name, value in values.items()}
        switched_off = [name for name in values if name.startswith("no_") and values[name] is True]
        for name in switched_off:
            values[name.removeprefix("no_")] = not values.pop(name)
        return cls({**(_read(Path(str(config))) if config is not None else {}), **values})


def _value(word: str) -> Any:
    """Return what the parser makes of a word: a number, a truth value, or the word."""
    if word in ("None", "none"):
        return word
    try:
        value = yaml.safe_load(word)
    except (yaml.YAMLError, ValueError, RecursionError):
        return word
    return value if isinstance(value, (bool, float, int)) else word


def _joined(value: Any, word: Any) -> Any:
    """Add a word to those of an option that takes several: ``--loss_type ipo sft``."""
    if value is None:
        return word
    return [*value, word] if isinstance(value, list) else [value, word]


def _read(path: Path) -> dict[str, Any]:
    file = plain(str(path))
    _, values = yaml_files.load(told_files.read(path, yaml_files.LARGEST, _EXPECTED), file, _EXPECTED)
    if not isinstance(values, dict):
        raise ScriptError(f"{file} has no mapping, but {told_files.kind_of(values)}; expected {_EXPECTED}")
    return {str(key): value for key, value in values.items()}
