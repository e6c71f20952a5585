"""Records are compared, and ranks have so much patience."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.recording import ranks

from helpers.records import RIGHT, warning_messages

NOTHING: dict[str, Any] = {"trl": "0.11.4", "patches": []}
ODD = "a\nb\x1b[31m"


def test_names_of_a_checkpoint_are_shown_escaped() -> None:
    record = {"trl": ODD, "patches": [{"id": ODD, "revision": 1, "options": {ODD: ODD}}]}
    lines = ranks.differences(record, NOTHING, "in the checkpoint", "now")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_a_difference_to_a_checkpoint_is_reported() -> None:
    assert ranks.differences(RIGHT, NOTHING, "then", "now") == ["some-patch is r1 over=all then, not on now"]


# TRL_HOTFIX_PATIENCE


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "soon", "1e999", "6 0", "\n\x1b[31m"])
def test_an_invalid_timeout_is_one_warning(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", value)
    assert ranks._patience() == ranks.RANK_TIMEOUT
    assert warning_messages(caplog) == [f"TRL_HOTFIX_PATIENCE is {value!r}, not a number of seconds; taken as 60"]


@pytest.mark.parametrize(("value", "seconds"), [("", 60.0), ("0", 0.0), ("2", 2.0), (" 1.5 ", 1.5)])
def test_the_timeout_is_in_seconds(value: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", value)
    assert ranks._patience() == seconds
