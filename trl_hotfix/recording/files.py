"""Write a file so that a full disk or a kill leaves the old one or the new one, and never a part of one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path``. Raises ``OSError``, after which ``path`` is as it was before."""
    # Ranks that share a folder, or two trainers of one process, must not write the same temporary file.
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
