"""A pipe is read if the shell opened it for the command. A named one may never end, and is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trl_hotfix import regular_files

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no paths of open pipes")


def through_a_pipe(content: bytes, largest: int) -> bytes:
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    try:
        return regular_files.read(f"/dev/fd/{reader}", largest)
    finally:
        os.close(reader)


def test_a_pipe_of_the_shell_is_read_up_to_the_size() -> None:
    assert through_a_pipe(b"trl==0.16.1\n", 12) == b"trl==0.16.1\n"
    with pytest.raises(regular_files.UnfitFileError, match="more than 0 KiB"):
        through_a_pipe(b"trl==0.16.1\n", 11)


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pins")
    with pytest.raises(regular_files.UnfitFileError, match="a pipe"):
        regular_files.read(tmp_path / "pins", 12)
