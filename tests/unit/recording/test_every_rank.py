"""What a patch was on every rank is in the record of rank 0: repaired is said if every rank repaired."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from trl_hotfix.recording import every_rank, ranks

from helpers.many_ranks import together

ENTRY = {"id": "a-patch", "revision": 1, "options": {}, "word": "repaired", "called": 3, "acted": 2}
RECORD = {"patches": [ENTRY]}


def merged(monkeypatch: pytest.MonkeyPatch, *others: Any, own: Any = RECORD) -> Any:
    """Return the record of rank 0 beside those of others. None: this rank does not answer."""
    said = [every_rank.said(own), *(None if other is None else other for other in others)]
    answers = {rank: answer for rank, answer in enumerate(said) if answer is not None}
    monkeypatch.setattr(ranks, "gather", lambda own, moment, patiently: answers)
    monkeypatch.setattr(ranks, "world_size", lambda: len(said))
    return every_rank.merged(dict(own), "end/0/2", patiently=True)


def says(word: str, called: int = 1, acted: int = 0) -> dict[str, Any]:
    return {"a-patch": [word, called, acted]}


def test_ranks_that_agree_have_one_word_and_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    record = merged(monkeypatch, says("repaired", 4, 4))
    assert record == {"patches": [{**ENTRY, "all_ranks": {"called": 7, "acted": 6}}]}


def test_a_rank_with_nothing_to_repair_is_named_and_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    record = merged(monkeypatch, says("called"), says("repaired", 1, 1))
    (entry,) = record["patches"]
    assert (entry["word"], entry["ranks"]) == ("repaired", {"repaired": [0, 2], "called": [1]})
    assert "problems" not in record


@pytest.mark.parametrize("word", ["standing by", "not seen", "unreached", "selected"])
def test_a_rank_that_did_not_call_it_is_a_problem(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    record = merged(monkeypatch, says(word, 0), says("repaired", 1, 1), says(word, 0))
    (entry,) = record["patches"]
    assert entry["word"] == "on some ranks"
    assert entry["ranks"] == {"repaired": [0, 2], word: [1, 3]}
    assert record["problems"] == [f"a-patch: repaired on ranks 0, 2; {word} on ranks 1, 3"]


def test_a_rank_that_does_not_have_it_or_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    record = merged(monkeypatch, {}, None, "what cannot be read")
    assert record["patches"][0]["ranks"] == {"repaired": [0], "off": [1]}
    assert record["problems"] == [
        "ranks 2, 3 did not say what became of the patches there",
        "a-patch: repaired on rank 0; off on rank 1",
    ]


def test_what_does_not_reach_a_rank_is_said_by_it() -> None:
    record = {"patches": [], "unreached": [{"id": "a-patch", "reason": "overridden"}]}
    assert every_rank.said(record) == {"a-patch": ["unreached", 0, 0]}


def test_one_process_keeps_its_record() -> None:
    assert every_rank.merged(RECORD, "end/0/2", patiently=True) is RECORD


def test_each_rank_says_its_own_and_rank_0_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(number: int) -> Any:
        return lambda: ranks.gather({"number": number}, "save/0/1")

    answers = together(monkeypatch, 3, {number: of_rank(number) for number in (0, 2, 1)})
    assert answers == {0: {number: {"number": number} for number in range(3)}, 1: {}, 2: {}}


def test_a_rank_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(ranks, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(ranks, "_store", lambda prefix: store)
    assert ranks.gather({"a": 1}, "end/0/2", patiently=False) == {0: {"a": 1}}
