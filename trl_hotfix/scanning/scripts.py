"""A file to scan is a training script, a notebook, or a config of TRL's command line. It is read, and never run."""

from __future__ import annotations

import ast
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from ..errors import ScriptError, plain, reason
from . import told_files, yaml_files
from .command_lines import CommandLine
from .notebooks import as_script
from .trainer_calls import TrainerCall, trainer_calls
from .yaml_configs import EXPECTED as CONFIG
from .yaml_configs import read_config

LARGEST = 1 << 25
"""The largest size in bytes of a file that is scanned. A notebook with its pictures has some megabytes."""

_LARGEST_CODE = 1 << 20
_MOST_STATEMENTS = 10_000
_MOST_TRAINERS = 500
"""At most so many bytes, statements and trainers. A long script has a tenth; the time grows with their square."""

_SCRIPT = "a training script (.py), a notebook (.ipynb) or a config of TRL's command line (.yaml)"


def read(path: Path, trainer: str | None = None, command_line: CommandLine | None = None) -> list[TrainerCall]:
    """Return the trainers that a file makes, in the order of the file. Raises ``ScriptError``.

    ``trainer`` names the trainer of a config whose keys do not tell it. ``command_line`` is what a script is started
    with, if that is told.
    """
    file = plain(str(path))
    if path.suffix.lower() in (".yaml", ".yml"):
        return [read_config(told_files.read(path, yaml_files.LARGEST, CONFIG), file, trainer)]
    source = told_files.read(path, LARGEST, _SCRIPT)
    if path.suffix.lower() == ".ipynb":
        text, cells = as_script(source, file)
        calls = trainer_calls(_parse(text.encode(), file), command_line)
        return [replace(call, cells=cells) for call in calls]
    if path.suffix.lower() in (".json", ".toml"):
        raise ScriptError(f"{file} is neither Python, a notebook nor YAML; expected {_SCRIPT}")
    # The parser of transformers puts the words of such a file before those of the command line.
    told = None if path.with_suffix(".args").exists() else command_line
    return list(trainer_calls(_parse(source, file), told))


def _parse(source: bytes, file: str) -> ast.Module:
    if len(source) > _LARGEST_CODE:
        if b"Trainer" not in source:
            # It makes none: a folder may have a large module of data.
            return ast.Module([], [])
        raise ScriptError(f"{file} has more than {_LARGEST_CODE >> 20} MiB of Python; expected a training script")
    try:
        with warnings.catch_warnings():
            # Python warns about code in the script such as an invalid escape sequence.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        location = f", line {line}" if line else ""
        problem = reason(ValueError(error.msg) if isinstance(error, SyntaxError) else error)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise ScriptError(f"{file}{location} is not Python {version}: {problem}; expected {_SCRIPT}") from None
    _check_size(tree, file)
    return tree


def _check_size(tree: ast.Module, file: str) -> None:
    nodes = list(ast.walk(tree))
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    trainers = sum(isinstance(node, ast.Call) and _name(node.func).endswith("Trainer") for node in nodes)
    for count, most, what in ((statements, _MOST_STATEMENTS, "statements"), (trainers, _MOST_TRAINERS, "trainers")):
        if count > most:
            raise ScriptError(f"{file} has {count} {what}, and more than {most} are not looked at; expected {_SCRIPT}")


def _name(function: ast.expr) -> str:
    """Return the last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
