"""A notebook, read as one script: its code cells from top to bottom."""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import ScriptError, reason

_MAGIC = re.compile(r"\s*[%!?]|\s*\w+[\w.]*\?\??\s*$")
_SHELL_ASSIGNMENT = re.compile(r"(\s*[\w, ]+=\s*)[%!].*", re.DOTALL)
_RUN = re.compile(r"\s*%(run|load|loadpy|rerun|macro)\b")
# Cells of these magics are Python, or run it.
_PYTHON_CELLS = frozenset(["capture", "time", "timeit", "prun", "memit", "mprun"])


def as_script(source: bytes, file: str) -> tuple[str, tuple[int, ...]]:
    """Return the text of all code cells, and the line at which each cell begins; other cells have no lines.

    Magics and shell commands become comments. ``%run`` becomes an import that may set any name. Raises ``ScriptError``.
    """
    try:
        notebook = json.loads(source)
        cells = notebook["cells"] if "cells" in notebook else notebook["worksheets"][0]["cells"]
        texts = [_code_of(cell) for cell in cells]
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        raise ScriptError(f"{file} is not a notebook: {reason(error)}; expected JSON with 'cells'") from None
    lines: list[str] = []
    starts = []
    for text in texts:
        starts.append(len(lines) + 1)
        lines += _without_magics(text)
    return "\n".join(lines) + "\n", tuple(starts)


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
    indentation = line[: len(line) - len(line.lstrip())]
    if _RUN.match(line):
        return f"{indentation}from ipython_run import *"
    shell = _SHELL_ASSIGNMENT.match(line)
    if shell is not None:
        return f"{shell[1]}ipython_output()"
    # `pass` keeps a block that has no other statement.
    return f"{indentation}pass  # {line.strip()}" if _MAGIC.match(line) else line
