"""The files to scan: those that are named, and the scripts and notebooks in folders that are named."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import ScriptError, plain

_SUFFIXES = (".py", ".ipynb")
_SKIPPED = frozenset(["__pycache__", "build", "dist", "node_modules", "site-packages", "venv"])


def files_to_scan(paths: Iterable[str]) -> list[tuple[Path, bool]]:
    """Return each file once, in order, and whether it was named. Raises ``ScriptError`` for a pattern without files.

    A folder stands for the scripts and notebooks below it. Hidden folders, and folders of installed packages, are left
    out, and so are YAML files, since few of them are configs of TRL.
    """
    files: dict[Path, bool] = {}
    for text in paths:
        path = Path(text)
        if path.is_dir():
            for file in _within(path):
                files.setdefault(file, False)
        elif not path.exists() and any(sign in text for sign in "*?["):
            # A shell expands a pattern, unless it is quoted or has no match.
            matched = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
            if not matched:
                raise ScriptError(f"{plain(text)} matches no file")
            files |= {file: True for file in matched if file.is_file()}
        else:
            files[path] = True
    return list(files.items())


def _within(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        found += [Path(parent, name) for name in sorted(names) if name.endswith(_SUFFIXES)]
    return found
