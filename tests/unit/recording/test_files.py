"""A file is the old one or the new one, and never a part of one."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.recording.files import write_atomically

FULL = OSError(errno.ENOSPC, "No space left on device")


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


class FullAfterHalf(io.StringIO):
    """A file on a full disk: a part of the text is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, text: str) -> int:
        self._path.write_bytes(text[: len(text) // 2].encode())
        raise FULL


def test_the_file_has_the_text(tmp_path: Path) -> None:
    path = tmp_path / "trl_hotfix.json"
    for text in ("{}\n", '{"ä": 1}\n'):
        write_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("before", [None, "a good record"])
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_file_of_before_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, error: BaseException, where: str
) -> None:
    path = tmp_path / "trl_hotfix.json"
    if before is not None:
        path.write_text(before)
    with monkeypatch.context() as full:
        if where == "write":
            error = FULL
            opened = Path.open

            def open_half(self: Path, *args: Any, **kwargs: Any) -> Any:
                return FullAfterHalf(self) if "w" in args and self.name.endswith(".tmp") else opened(self, *args)

            full.setattr(Path, "open", open_half)
        elif where == "fsync":
            full.setattr(os, "fsync", failing(error))
        else:
            full.setattr(Path, "replace", failing(error))
        with pytest.raises(type(error)):
            write_atomically(path, "the new record")
    assert [one.name for one in tmp_path.iterdir()] == ([path.name] if before is not None else [])
    if before is not None:
        assert path.read_text() == before


def test_the_text_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash of the machine may leave a file of this name without content."""
    path, steps = tmp_path / "trl_hotfix.json", []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: steps.append(("fsync", os.fstat(file).st_size)) or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda old, new: steps.append(("replace", new.exists())) or replace(old, new))
    write_atomically(path, "12345")
    assert steps == [("fsync", 5), ("replace", False)]


def test_the_error_of_a_missing_folder_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "gone" / "trl_hotfix.json", "{}")


def test_what_readers_see_is_always_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "trl_hotfix.json", [letter * 50_000 for letter in "ab"]
    write_atomically(path, texts[0])
    done = threading.Event()

    def write() -> None:
        for number in range(100):
            write_atomically(path, texts[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(texts)
