"""The records of two ranks, or of a checkpoint and now, are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.records import RIGHT, like_a_function, records, warning_messages
from hypothesis import given
from hypothesis import strategies as st

from trl_hotfix.recording import ranks

NOTHING: dict[str, Any] = {"trl": "0.11.4", "patches": []}
ODD = "a\nb\x1b[31m"


def test_names_of_a_checkpoint_are_shown_escaped() -> None:
    record = {"trl": ODD, "patches": [{"id": ODD, "revision": 1, "options": {ODD: ODD}}]}
    lines = ranks.differences(record, NOTHING, "in the checkpoint", "now")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_a_difference_to_a_checkpoint_is_reported() -> None:
    assert ranks.differences(RIGHT, NOTHING, "then", "now") == ["some-patch is r1 over=all then, not on now"]


def collected(answer: bytes) -> list[str]:
    from torch.distributed import HashStore

    store = HashStore()
    store.set("1", answer)
    return ranks._collected(store, RIGHT, 2, 0.0)


# Other ranks


@like_a_function
@given(answer=st.binary(max_size=40) | records.map(lambda line: json.dumps(line).encode()))
def test_any_answer_of_a_rank_is_equal_or_names_it(answer: bytes) -> None:
    differences = collected(answer)
    assert all(line.startswith("rank 1: ") and line.isprintable() for line in differences)


@pytest.mark.parametrize("answer", [b"", b"\xff", b"{", b"3", b"[" * 100_000, b'{"patches": [{}]}'])
def test_a_rank_with_an_unreadable_record_is_named(answer: bytes) -> None:
    assert collected(answer) == ["rank 1: its record cannot be read"]


def test_a_rank_with_the_same_record_is_not_named() -> None:
    assert collected(json.dumps(RIGHT).encode()) == []


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
