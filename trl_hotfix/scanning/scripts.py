"""A file to scan is a training script, a notebook, or a config of TRL's command line. It is read, and never run."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ScriptError, plain, reason
from . import told_files, yaml_files
from .beside import Beside
from .bindings import ScriptBindings, parsed
from .budget import REASON, TooLargeError
from .found import NO_CELLS, Cells, Trainers, Unseen
from .imports import imported_trainers
from .notebooks import as_script
from .readers import tell_command_line, unread, unread_by_nothing
from .started import started_trainers
from .trainer_calls import trainer_calls
from .unseen import unseen_trainers
from .yaml_configs import EXPECTED as CONFIG
from .yaml_configs import read_config

LARGEST = 1 << 24
"""The largest size in bytes of a file that is scanned. A notebook with its pictures has some megabytes."""

LARGEST_CODE = 1 << 20
_MOST_WORDS = 75_000
"""At most so many bytes of Python, with so many words and signs. Its syntax tree takes a kilobyte for each of them."""

MOST_TRAINERS = 60
"""At most so many trainers of a file are judged."""

_SCRIPT = "a training script (.py), a notebook (.ipynb) or a config of TRL's command line (.yaml)"
_WORD = re.compile(rb"[\w\x80-\xff]+|[^\w\s\x80-\xff]")
_OF_TRL = re.compile(rb"Trainer|\btrl\b")


def read(path: Path, trainer: str | None = None, words: Sequence[str] | None = None) -> Trainers:
    """Return the trainers that a file makes. Raises ``ScriptError``.

    ``trainer`` names the trainer of a config whose keys do not tell it. ``words`` are the arguments that a script
    starts with, if we have them.
    """
    file = plain(str(path))
    if path.suffix.lower() in (".yaml", ".yml"):
        call = read_config(told_files.read(path, yaml_files.LARGEST, CONFIG), file, trainer)
        return Trainers([call], [], NO_CELLS, unread_by_nothing(words or (), f"a config takes no arguments, as {file}"))
    source = told_files.read(path, LARGEST, _SCRIPT)
    if path.suffix.lower() == ".ipynb":
        text, cells = as_script(source, file, LARGEST_CODE)
        return _scanned(text.encode(), path, words, cells)
    if path.suffix.lower() in (".json", ".toml"):
        raise ScriptError(f"{file} is neither Python, a notebook nor YAML; expected {_SCRIPT}")
    return _scanned(source, path, words)


def may_use_trl(path: Path) -> bool:
    """Return whether a file has a word of TRL. Most scripts of a project are without one, and need no parsing."""
    return _OF_TRL.search(told_files.read(path, LARGEST, _SCRIPT)) is not None


def _scanned(source: bytes, path: Path, words: Sequence[str] | None, cells: Cells = NO_CELLS) -> Trainers:
    file, beside = plain(str(path)), Beside(path.absolute())
    try:
        script = ScriptBindings(_parse(source, file), words, beside)
    except TooLargeError:
        raise ScriptError(f"{file} has functions that are nested too deeply; expected {_SCRIPT}") from None
    # transformers' parser puts the words of such a file before those of the command line.
    tell_command_line(script, has_file_of_words=path.with_suffix(".args").exists())
    calls, unseen, *_ = trainer_calls(script)
    unseen += unseen_trainers(script)
    if not calls and not unseen:
        unseen = imported_trainers(script, beside) or started_trainers(script, beside)
    more = calls[MOST_TRAINERS:]
    if more:
        reason = f"{REASON}: it makes {len(calls)} trainers of TRL, and {len(more)} of them are not judged"
        unseen = [*unseen, Unseen(more[0].line, reason)]
    judged = [replace(call, cells=cells) for call in calls[:MOST_TRAINERS]]
    return Trainers(judged, unseen, cells, unread(script, file))


def _parse(source: bytes, file: str) -> ast.Module:
    if _is_too_large(source):
        if not _OF_TRL.search(source):
            # It makes none: a folder may have a large module of data.
            return ast.Module([], [])
        most = f"{LARGEST_CODE >> 20} MiB, or {_MOST_WORDS} words and signs,"
        raise ScriptError(f"{file} is too large: it has more than {most} of Python; expected a training script")
    try:
        return parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        location = f", line {line}" if line else ""
        problem = reason(ValueError(error.msg) if isinstance(error, SyntaxError) else error)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise ScriptError(f"{file}{location} is not Python {version}: {problem}; expected {_SCRIPT}") from None


def _is_too_large(source: bytes) -> bool:
    if len(source) > LARGEST_CODE:
        return True
    # A text without so many bytes has no more words.
    return len(source) > _MOST_WORDS and sum(1 for _ in _WORD.finditer(source)) > _MOST_WORDS
