"""Read a file of the user: up to a size, and only a regular one. A device, a pipe, or a file that grows never ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFileError(ValueError):
    """The file has too many bytes, or is none. The message says what was found."""


def read(path: str | Path, largest: int) -> bytes:
    """Return the bytes of a regular file. Raises ``OSError``, or ``UnfitFileError`` for more than ``largest`` bytes."""
    # To open a device can have an effect, so it is looked at first. It is looked at again, since it may be another now.
    # The files of /proc, some of which wait for something to be written, are regular and have no size.
    if not _checked_size(Path(path).stat(), largest):
        return b""
    with open(path, "rb", opener=_open_without_waiting) as file:
        content = file.read(largest + 1) if _checked_size(os.fstat(file.fileno()), largest) else b""
    if len(content) > largest:
        raise UnfitFileError(_too_large(largest))
    return content


def _checked_size(found: os.stat_result, largest: int) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError(f"it is no regular file, but {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}")
    if found.st_size > largest:
        raise UnfitFileError(_too_large(largest))
    return found.st_size


def _too_large(largest: int) -> str:
    return f"it has more than {f'{largest >> 20} MiB' if largest >= 1 << 20 else f'{largest >> 10} KiB'}"


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
