"""Read a file that the user has named, whatever it is: a size is kept, and each problem is one ``ScriptError``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import regular_files
from ..errors import ScriptError, plain, reason


def read(path: Path, largest: int, expected: str) -> bytes:
    """Return the bytes of a regular file of at most ``largest``. ``expected`` says what it should have been."""
    try:
        return regular_files.read(path, largest)
    except (OSError, ValueError) as error:
        raise ScriptError(f"{plain(str(path))} cannot be read: {reason(error)}; expected {expected}") from None


def read_text(path: Path, largest: int, expected: str) -> str:
    """Return the text of such a file, which is UTF-8."""
    content = read(path, largest, expected)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is not UTF-8"
        raise ScriptError(f"{plain(str(path))} is no text: {found}; expected {expected}") from None


def kind_of(value: Any) -> str:
    """Return in words what there is in YAML or JSON, where there should have been pairs of names and values."""
    kinds = {type(None): "nothing", list: "a list", str: "a text"}
    return kinds.get(type(value), "a single value")
