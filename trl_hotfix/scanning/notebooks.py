"""A notebook, read as one script: its code cells from top to bottom."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ScriptError, reason
from . import json_files
from .found import Cells

# The expressions match a line without its indentation, in one way only: a line may have a million letters.
_MAGIC = re.compile(r"[%!?]|\w[\w.]*\?\??\s*$")
_SHELL_ASSIGNMENT = re.compile(r"(\w[\w, ]*=\s*)[%!].*", re.DOTALL)
_RUN = re.compile(r"%(run|load|loadpy|rerun|macro)\b")
# Cells of these magics are Python, or run it.
_PYTHON_CELLS = frozenset(["capture", "time", "timeit", "prun", "memit", "mprun"])


def as_script(source: bytes, file: str, largest: int) -> tuple[str, Cells]:
    """Return the text of all code cells, and the line at which each cell begins; other cells have no lines.

    Magics and shell commands become comments. ``%run`` becomes an import that may set any name. Raises ``ScriptError``.
    """
    try:
        notebook = json_files.parse(source)
        cells = notebook["cells"] if "cells" in notebook else notebook["worksheets"][0]["cells"]
        texts = [_code_of(cell) for cell in cells]
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        raise ScriptError(f"{file} is not a notebook: {reason(error)}; expected JSON with 'cells'") from None
    if sum(map(len, texts)) > largest:
        raise ScriptError(f"{file} is too large: its cells have more than {largest >> 20} MiB of code")
    lines: list[str] = []
    starts = []
    for text in texts:
        starts.append(len(lines) + 1)
        lines += _without_magics(text)
    return "\n".join(lines) + "\n", Cells(starts)


def _code_of(cell: object) -> str:
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return ""
    source: Any = cell.get("source", cell.get("input", ""))
    return source if isinstance(source, str) else "".join(map(str, source))


def _without_magics(text: str) -> list[str]:
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("%%") and first.lstrip()[2:].split(" ")[0].strip() not in _PYTHON_CELLS:
        return [f"# {line}" for line in lines]
    return [_plain_python(line) for line in lines]


def _plain_python(line: str) -> str:
    if not any(sign in line for sign in "%!?"):
        return line
    text = line.lstrip()
    indentation = line[: len(line) - len(text)]
    if _RUN.match(text):
        return f"{indentation}from ipython_run import *"
    shell = _SHELL_ASSIGNMENT.match(text)
    if shell is not None:
        return f"{indentation}{shell[1]}ipython_output()"
    # `pass` keeps a block that has no other statement.
    return f"{indentation}pass  # {text.strip()}" if _MAGIC.match(text) else line
