"""A file to scan is a training script, or a config of TRL's command line. It is read, and never run or imported."""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path

from ..errors import ScriptError, plain
from .trainer_calls import TrainerCall, trainer_calls
from .yaml_configs import read_config


def read(path: Path, trainer: str | None = None) -> list[TrainerCall]:
    """Return the trainers that a script or a config makes, in the order of the file. Raises ``ScriptError``.

    ``trainer`` names the trainer of a config whose keys do not tell it.
    """
    file = plain(str(path))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ScriptError(f"{file} cannot be read: {error.strerror or error}") from None
    if path.suffix.lower() in (".yaml", ".yml"):
        return [read_config(source, file, trainer)]
    if path.suffix.lower() in (".ipynb", ".json", ".toml"):
        raise ScriptError(f"{file} is neither Python nor YAML: a notebook can be saved as a script (.py)")
    return list(trainer_calls(_parse(source, file)))


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
