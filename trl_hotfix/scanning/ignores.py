"""Accepted findings in the text of a script: ``# trl-hotfix: ignore[id] reason``.

Such a comment accepts a bug in its whole file. It is read as a comment alone: the same words in a string do nothing.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ..errors import ScriptError, plain, quoted, suggestion
from . import told_files, yaml_files
from .found import NO_CELLS, Cells
from .notebooks import as_script
from .scripts import LARGEST, LARGEST_CODE

_MARK = "trl-hotfix:"
_BEGINS = re.compile(r"#\s*trl-hotfix:\s*ignore\b")
_COMMENT = re.compile(r"#\s*trl-hotfix:\s*ignore\[([^\]]*)\](.*)")
_EXPECTED = "# trl-hotfix: ignore[ID] reason"


@dataclass(frozen=True, slots=True)
class Ignore:
    """A bug that the user accepts, the reason, and the place where the user says so.

    ``file`` is empty for an option of the command. ``position`` names the line, with its cell in a notebook.
    """

    id: str
    reason: str
    file: str = ""
    line: int = 1
    position: str = ""
    review_by: date | None = None

    @property
    def place(self) -> str:
        return f"{self.file}, {self.position}" if self.file else self.position


def present_id(name: str, known: Mapping[str, str], place: str) -> str:
    """Return the present id of the bug that ``known`` has under ``name``. Raises ``ScriptError``."""
    if name not in known:
        hint = suggestion(name[:80], known) or "; `trl-hotfix list --all` shows every id"
        raise ScriptError(f"{place}: ignore: unknown bug {quoted(name)}{hint}")
    return known[name]


def ignores_in(path: Path, known: Mapping[str, str]) -> list[Ignore]:
    """Return what the comments of a script, a notebook or a YAML config accept. Raises ``ScriptError``.

    ``known`` has the present id of each bug by its present and former names. The file has been scanned before.
    """
    file = plain(str(path))
    source = told_files.read(path, LARGEST, "a script")
    is_notebook = path.suffix.lower() == ".ipynb"
    # A larger script was not parsed either, since it makes no trainer.
    if _MARK.encode() not in source or (len(source) > LARGEST_CODE and not is_notebook):
        return []
    cells = NO_CELLS
    if is_notebook:
        text, cells = as_script(source, file, LARGEST_CODE)
        source = text.encode()
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    comments = _comments_of_yaml(source[: yaml_files.LARGEST]) if is_yaml else _comments_of_python(source)
    return [ignore for line, comment in comments for ignore in _read(comment, line, file, cells, known)]


def _comments_of_python(source: bytes) -> Iterator[tuple[int, str]]:
    try:
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    # The parser accepts a few texts that the tokenizer of the standard library does not.
    except (tokenize.TokenError, SyntaxError):
        return


def _comments_of_yaml(source: bytes) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.decode("utf-8-sig", "replace").splitlines(), 1):
        found = _BEGINS.search(line) if _MARK in line else None
        # A sign in the middle of a word begins no comment.
        if found is not None and (found.start() == 0 or line[found.start() - 1].isspace()):
            yield number, line[found.start() :]


def _read(comment: str, line: int, file: str, cells: Cells, known: Mapping[str, str]) -> Iterator[Ignore]:
    if _MARK not in comment or _BEGINS.match(comment) is None:
        return
    position = cells.position(line)
    place = f"{file}, {position}"
    matched = _COMMENT.match(comment)
    names = [name for name in map(str.strip, matched[1].split(",")) if name] if matched is not None else []
    if matched is None or not names:
        raise ScriptError(f"{place}: ignore: which bug is not there; expected {_EXPECTED}")
    reason = matched[2].strip().lstrip(":-").strip()
    if not reason:
        raise ScriptError(f"{place}: ignore: the reason is missing; expected {_EXPECTED}")
    for name in names:
        yield Ignore(present_id(name, known, place), plain(reason), file, line, position)
