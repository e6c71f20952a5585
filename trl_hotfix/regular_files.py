"""Read a file of the user: up to a size, and only a regular one, since a device or a file that grows never ends.

A pipe is read if the shell opened it for the command, as in ``trl-hotfix audit <(pip freeze)``.
"""

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
_OPENED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""The paths of what was opened before the command began."""


class UnfitFileError(ValueError):
    """The file has too many bytes, or is not a file. The message says what was found."""


def read(path: str | Path, largest: int) -> bytes:
    """Return the bytes of a regular file. Raises ``OSError``, or ``UnfitFileError`` for more than ``largest`` bytes."""
    if str(path).startswith(_OPENED) and stat.S_ISFIFO(Path(path).stat().st_mode):
        with Path(path).open("rb") as pipe:
            return _not_too_large(pipe.read(largest + 1), largest)
    # To open a device can have an effect, so we check first. We check again later, since it may be another file now.
    # The files of /proc are regular and have no size, and some wait for something to be written.
    if not _checked_size(Path(path).stat(), largest):
        return b""
    with open(path, "rb", opener=_open_without_waiting) as file:
        content = file.read(largest + 1) if _checked_size(os.fstat(file.fileno()), largest) else b""
    return _not_too_large(content, largest)


def _checked_size(found: os.stat_result, largest: int) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError(f"it is no regular file, but {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}")
    if found.st_size > largest:
        raise UnfitFileError(_too_large(largest))
    return found.st_size


def _not_too_large(content: bytes, largest: int) -> bytes:
    if len(content) > largest:
        raise UnfitFileError(_too_large(largest))
    return content


def _too_large(largest: int) -> str:
    return f"it has more than {f'{largest >> 20} MiB' if largest >= 1 << 20 else f'{largest >> 10} KiB'}"


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
