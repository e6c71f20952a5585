"""The files to scan: those that are named, and the scripts and notebooks in folders that are named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import LONG, REASON, ScriptError, printable, reason

_LONGEST = 1_000
"""At most so many characters are a pattern. The time that it takes grows with their square."""

_SUFFIXES = (".py", ".ipynb")
_SKIPPED = frozenset(["__pycache__", "build", "dist", "node_modules", "site-packages", "venv"])


def files_to_scan(paths: Iterable[str]) -> list[tuple[Path, bool]]:
    """Return each file once, in order, and if it was named. Raises ``ScriptError`` for a pattern or a folder with
    none.

    A folder stands for the scripts and notebooks below it. Hidden folders, and folders of installed packages, are left
    out, and so are YAML files, since few of them are configs of TRL.
    """
    files: dict[Path, bool] = {}
    for text in paths:
        path = Path(text)
        # It may be too long to be that of a file. `pathlib` raises then, and the file is refused when it is read.
        if os.path.isdir(text):  # noqa: PTH112
            within = _within(path)
            if not within:
                raise ScriptError(
                    f"{printable(text, REASON)} has nothing to scan: looked for .py and .ipynb in it and its folders; "
                    "expected scripts or notebooks (a YAML config has to be named itself)"
                )
            for file in within:
                files.setdefault(file, False)
        elif not os.path.exists(text) and len(text) < _LONGEST and any(sign in text for sign in "*?["):  # noqa: PTH110
            # A shell expands a pattern, unless it is quoted or has no match.
            try:
                matched = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
            except (OSError, ValueError, NotImplementedError, RecursionError, re.error) as error:
                raise ScriptError(
                    f"{printable(text, LONG)} is no pattern: {reason(error)}; expected one of files"
                ) from None
            if not matched:
                raise ScriptError(
                    f"{printable(text, LONG)} matches no file; expected a file, a folder or a pattern of files"
                )
            files |= {file: True for file in matched if file.is_file()}
        else:
            files[path] = True
    return list(files.items())


def _within(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        paths = [Path(parent, name) for name in sorted(names) if name.endswith(_SUFFIXES)]
        # A pipe or a device is no script.
        found += [path for path in paths if path.is_file()]
    return found
