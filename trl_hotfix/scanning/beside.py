"""The files beside a script, and those of its project, from which it imports: they are read as far as it needs them."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .. import regular_files
from .bindings import ScriptBindings, parsed
from .budget import TooLargeError
from .names import classes, constructor, is_trainer
from .scopes import FUNCTIONS, ScopedExpression

_LARGEST = 1 << 19
_MOST_FILES = 20
"""At most so many bytes, and so many files, are read for one script."""

_STEPS_OF_FILE = 20
_MOST_FOLDERS = 4
_MARKS = (".git", "pyproject.toml", "setup.py")
"""The folder of a project has one of these."""

_END = 10**9


class Foreign(NamedTuple):
    """A class of another file, with the trainers of TRL that it derives from. ``may_set``: it may set arguments."""

    file: Path
    trainers: list[str]
    may_set: bool


class Beside:
    """The files that a script may import. Each is read once, by its path."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self._left = _LARGEST
        self._read: dict[Path, ScriptBindings | None] = {}
        self._classes: dict[str, Foreign | None] = {}

    def file(self, dotted: str, importer: Path) -> tuple[Path, str] | None:
        """Return the file that has ``package.module.name``, imported in another file, and the name in it."""
        level = len(dotted) - len(dotted.lstrip("."))
        parts = dotted.lstrip(".").split(".")
        for folder in importer.parents[level - 1 : level] if level else roots(importer):
            for count in range(len(parts), -1, -1):
                path = folder.joinpath(*parts[:count])
                found = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
                if found is not None and (count or level) and found != importer:
                    return found, ".".join(parts[count:])
        return None

    def bindings(self, file: Path) -> ScriptBindings | None:
        """Return what a file binds, or None if it cannot be read, or is one too many."""
        if file not in self._read:
            source = _source(file, self._left) if len(self._read) < _MOST_FILES else b""
            self._left -= len(source)
            self._read[file] = _bindings(source) if source else None
        return self._read[file]

    def trainer(self, function: ScopedExpression) -> Foreign | None:
        """Return the class of another file that a class is, or derives from, if that is one of TRL's trainers."""
        for dotted, definition in classes(function):
            if definition is None and "." in dotted.strip(".") and not is_trainer(dotted):
                if dotted not in self._classes:
                    # To look for a file takes as long as a few steps.
                    function.budget.spend(_STEPS_OF_FILE)
                    self._classes[dotted] = self.class_of(dotted, self.script, set())
                found = self._classes[dotted]
                if found is not None and found.trainers:
                    return found
        return None

    def class_of(self, dotted: str, importer: Path, visited: set[tuple[Path, str]]) -> Foreign | None:
        """Return the class of this name; None if no file that can be read has it."""
        located = self.file(dotted, importer)
        if located is None or located in visited:
            return None
        visited.add(located)
        file, name = located
        script = self.bindings(file)
        if script is None or not name or "." in name:
            return None
        expression = ScopedExpression(ast.Name(name, ast.Load(), lineno=_END), script.module, _END)
        trainers: list[str] = []
        may_set = False
        for base, definition in script.budget.ask(lambda: list(classes(expression)), []):
            if is_trainer(base):
                trainers.append(base)
            elif definition is not None:
                may_set = may_set or _may_set(definition)
            elif base != name:
                foreign = self.class_of(base, file, visited)
                trainers += foreign.trainers if foreign is not None else []
                may_set = may_set or (foreign is not None and foreign.may_set)
        return Foreign(file, trainers, may_set)


def _may_set(definition: ast.ClassDef) -> bool:
    """May a class set arguments of its trainer: in a constructor, in ``train``, or of ``self``?"""
    if constructor(definition) is not None or definition.decorator_list:
        return True
    return any(
        (isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, FUNCTIONS) and node.name == "train")
        or (isinstance(node, ast.Name) and node.id in ("self", "setattr"))
        for node in ast.walk(definition)
    )


@lru_cache(maxsize=64)
def roots(importer: Path) -> tuple[Path, ...]:
    """Return the folders from which a file imports: its own, and those up to that of its project."""
    folders = importer.parents[:_MOST_FOLDERS]
    for count, folder in enumerate(folders, 1):
        if any((folder / mark).exists() for mark in _MARKS):
            return (*folders[:count], folder / "src")
    return tuple(folders[:1])


def _source(file: Path, largest: int) -> bytes:
    """Return the bytes of a file, or none if it has more or cannot be read. One that is empty binds nothing."""
    try:
        return regular_files.read(file, largest) or b"pass"
    except (OSError, ValueError):
        return b""


def _bindings(source: bytes) -> ScriptBindings | None:
    try:
        return ScriptBindings(parsed(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError, TooLargeError):
        return None
