"""A file to scan is a training script, a notebook, or a config of TRL's command line. It is read, and never run."""

from __future__ import annotations

import ast
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from ..errors import ScriptError, plain
from .command_lines import CommandLine
from .notebooks import as_script
from .trainer_calls import TrainerCall, trainer_calls
from .yaml_configs import read_config


def read(path: Path, trainer: str | None = None, command_line: CommandLine | None = None) -> list[TrainerCall]:
    """Return the trainers that a file makes, in the order of the file. Raises ``ScriptError``.

    ``trainer`` names the trainer of a config whose keys do not tell it. ``command_line`` is what a script is started
    with, if that is told.
    """
    file = plain(str(path))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{file} cannot be read: {error.strerror or error}") from None
    if path.suffix.lower() in (".yaml", ".yml"):
        return [read_config(source, file, trainer)]
    if path.suffix.lower() == ".ipynb":
        text, cells = as_script(source, file)
        calls = trainer_calls(_parse(text.encode(), file), command_line)
        return [replace(call, cells=cells) for call in calls]
    if path.suffix.lower() in (".json", ".toml"):
        raise ScriptError(f"{file} is neither Python (.py), a notebook (.ipynb) nor YAML (.yaml)")
    # The parser of transformers puts the words of such a file before those of the command line.
    told = None if path.with_suffix(".args").exists() else command_line
    return list(trainer_calls(_parse(source, file), told))


def _parse(source: bytes, file: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # Python warns about code in the script such as an invalid escape sequence.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        location = f", line {error.lineno}" if error.lineno else ""
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise ScriptError(f"{file}{location} is not Python {version}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(f"{file} is not Python: {error or type(error).__name__}") from None
