"""The line of progress."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from trl_hotfix.commands import progress


def line_of(patience: float, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> str:
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80)
    with progress.progress("scan", 3, console) as advance:
        for number in range(3):
            advance(number, "[bold]x.py")
    return file.getvalue()


def test_a_line_is_only_on_a_terminal_and_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_of(60.0, monkeypatch) == ""
    assert line_of(0.0, monkeypatch, is_terminal=False) == ""
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", line_of(0.0, monkeypatch))
    assert re.search(r"scan .* 2/3 .*\[bold\]x\.py", shown)
