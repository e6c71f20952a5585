"""The records of two ranks, or of a checkpoint and now, are compared."""

from __future__ import annotations

import itertools
import json
import threading
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


OTHER = {"trl": "0.11.4", "patches": [{"id": "some-patch", "revision": 2, "options": {"over": "all"}}]}


class Ranks(threading.local):
    """The rank of a thread, and the number of its next round, as each process has them."""

    rank = -1

    def __init__(self) -> None:
        self.rounds = itertools.count()

    def __next__(self) -> int:
        return next(self.rounds)


def compared(monkeypatch: pytest.MonkeyPatch, *of_ranks: Any) -> list[list[str]]:
    """Return what each rank is told, where None stands for a rank that does not take part."""
    import torch.distributed

    store, this, told = torch.distributed.HashStore(), Ranks(), dict.fromkeys(range(len(of_ranks)))
    monkeypatch.setattr(ranks, "_rounds", this)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: this.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(of_ranks))
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", "20" if None not in of_ranks else "0.2")

    def run(rank: int) -> None:
        this.rank = rank
        told[rank] = ranks.compare(of_ranks[rank])

    taking_part = [rank for rank, record in enumerate(of_ranks) if record is not None]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in taking_part]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [told[rank] for rank in taking_part]


def test_ranks_with_the_same_record_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, RIGHT, RIGHT, RIGHT) == [[], [], []]


def test_each_rank_is_told_which_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [
        "rank 1, 3: some-patch is r1 over=all on rank 0, r2 over=all there",
        "rank 2: some-patch is r1 over=all on rank 0, not on there",
    ]
    assert compared(monkeypatch, RIGHT, OTHER, NOTHING, OTHER) == [differences] * 4


def test_each_rank_is_told_which_rank_does_not_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, RIGHT, RIGHT, None) == [["rank 2: no trl_hotfix is on there"]] * 2


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
