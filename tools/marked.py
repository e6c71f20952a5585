"""Blocks of a page that a script writes: what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""

from __future__ import annotations

import re
from pathlib import Path


def replaced(text: str, name: str, content: str) -> str:
    """Return a page with ``content`` as its block ``name``. Raises ``ValueError`` if it has not one such block."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    found = pattern.findall(text)
    if len(found) != 1:
        raise ValueError(f"expected one block {begin.strip()!r} ... {end.strip()!r}, found {len(found)}")
    return text.replace(found[0], f"{begin}{content}{end}")


def write(page: Path, name: str, content: str) -> None:
    text = page.read_text(encoding="utf-8")
    try:
        page.write_text(replaced(text, name, content), encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from None
