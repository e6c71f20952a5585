"""All ranks hear the same."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_hotfix.model import Strict
from trl_hotfix.recording import agreement, ranks
from trl_hotfix.recording.agreement import Agreed, Problem, Says, agree, ask_to_stop, stop_asked

from helpers.many_ranks import together
from helpers.records import RIGHT, like_a_function, records

NOTHING: dict[str, Any] = {"trl": "0.11.4", "patches": []}
OTHER = {"trl": "0.11.4", "patches": [{"id": "some-patch", "revision": 2, "options": {"over": "all"}}]}
FAILED = Problem("some-patch: failed (self-test)", "some-patch")


def says(record: Any = RIGHT, *problems: Problem, level: Strict = Strict.RUN, may_hit: tuple[str, ...] = ()) -> Says:
    return Says(level, problems, may_hit, record)


def agreed(monkeypatch: pytest.MonkeyPatch, *of_ranks: Says | None, patience: str = "20") -> list[Agreed]:
    """Return what each rank hears, where None stands for a rank that takes no part."""
    taking_part = {
        rank: lambda own=own: agree(own, "begin/0")  # type: ignore[misc]
        for rank, own in enumerate(of_ranks)
        if own is not None
    }
    return list(together(monkeypatch, len(of_ranks), taking_part, patience).values())


def test_one_process_has_its_own_problems() -> None:
    assert agree(says(RIGHT, FAILED), "begin/0") == Agreed(Strict.RUN, (FAILED,))


def test_ranks_with_the_same_record_have_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, says(), says(), says()) == [Agreed(Strict.RUN)] * 3


def test_each_rank_hears_which_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    all_agreed = agreed(monkeypatch, says(), says(OTHER), says(NOTHING), says(OTHER))
    assert all_agreed == all_agreed[:1] * 4
    assert all_agreed[0].lines() == [
        "rank 1, 3: some-patch is r1 over=all on rank 0, r2 over=all there",
        "rank 2: some-patch is r1 over=all on rank 0, not on there",
    ]


@pytest.mark.parametrize("hit_on", [0, 1])
def test_a_difference_ends_a_run_that_may_hit_the_bug(monkeypatch: pytest.MonkeyPatch, hit_on: int) -> None:
    both = [(), ("some-patch",)] if hit_on else [("some-patch",), ()]
    one, _ = agreed(monkeypatch, says(may_hit=both[0]), says(NOTHING, may_hit=both[1]))
    assert [problem.ends for problem in one.problems] == [Strict.RUN]
    assert one.ending


def test_a_difference_in_what_the_run_cannot_need_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = agreed(monkeypatch, says(), says(NOTHING))
    assert [problem.ends for problem in one.problems] == [Strict.ALL]
    assert one.ending == []


def test_what_is_wrong_on_another_rank_is_said_once_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = agreed(monkeypatch, says(), says(NOTHING, FAILED), says(NOTHING, FAILED))
    assert first.lines() == ["rank 1, 2: some-patch: failed (self-test)"]
    assert [problem.patch for problem in first.ending] == ["some-patch"]
    assert second == first


def test_what_is_wrong_on_all_ranks_is_said_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = agreed(monkeypatch, says(NOTHING, FAILED), says(NOTHING, FAILED))
    assert first == second == Agreed(Strict.RUN, (FAILED,))


def test_what_is_wrong_on_rank_0_alone_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = agreed(monkeypatch, says(RIGHT, FAILED), says())
    assert first == second
    assert first.lines() == ["rank 0: some-patch: failed (self-test)"]


def test_the_strictest_rank_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    all_agreed = agreed(monkeypatch, says(level=Strict.NOTHING), says(level=Strict.ALL), says(level=Strict.RUN))
    assert [one.level for one in all_agreed] == [Strict.ALL] * 3


def test_each_rank_hears_which_rank_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    all_agreed = agreed(monkeypatch, says(), says(), None, patience="0.5")
    assert [one.lines() for one in all_agreed] == [
        ["rank 2: no answer within 0.5 s (TRL_HOTFIX_PATIENCE): no trl_hotfix is on there, or it is slow"]
    ] * 2
    assert all(one.ending for one in all_agreed)


def test_without_rank_0_the_others_hear_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    all_agreed = agreed(monkeypatch, None, says(RIGHT, FAILED), says(), patience="0.3")
    assert all_agreed[0] == all_agreed[1]
    assert all_agreed[0].lines()[-1].startswith("rank 0 did not answer within 0.3 s (TRL_HOTFIX_PATIENCE): ")
    assert all_agreed[0].ending


def test_a_rank_0_that_comes_too_late_hears_what_the_others_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    def late() -> Agreed:
        time.sleep(0.8)
        return agree(says(), "begin/0")

    found = together(monkeypatch, 2, {0: late, 1: lambda: agree(says(), "begin/0")}, patience="0.3")
    assert found[0] == found[1]
    (line,) = found[0].lines()
    assert line.startswith("rank 0 did not answer within 0.3 s (TRL_HOTFIX_PATIENCE): ")


def test_a_store_that_is_gone_is_a_rank_0_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def set(self, *_: Any) -> None: ...

        def check(self, *_: Any) -> bool:
            raise RuntimeError("Connection reset by peer")

        compare_set = check

    monkeypatch.setattr(ranks, "rank_and_world", lambda: (1, 2))
    monkeypatch.setattr(ranks, "_store", lambda prefix: Gone())
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", "0")
    (line,) = agree(says(), "begin/0").lines()
    assert line.startswith("rank 0 did not answer within 0 s (TRL_HOTFIX_PATIENCE): ")


@like_a_function
@given(answer=records | st.just(msgspec.to_builtins(says())) | records.map(lambda one: {"level": 1, "record": one}))
def test_any_answer_of_a_rank_is_equal_or_names_it(answer: Any) -> None:
    one = agreement._merged(says(), {1: answer})
    assert all(line.startswith("rank 1: ") and line.isprintable() for line in one.lines())
    is_right = isinstance(answer, dict) and answer.get("record") == RIGHT
    assert bool(one.problems) is not is_right


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"{", b"3", b"[" * 100_000, b'{"level": 9}', b'{"level": 1, "record": 3}']
)
def test_a_rank_whose_answer_cannot_be_read_is_named(text: bytes) -> None:
    one = agreement._merged(says(), {1: ranks._read(text) or "what cannot be read"})
    assert one.lines() == ["rank 1: its record cannot be read"]


def test_a_rank_asks_all_to_stop_after_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(asks: bool) -> Any:
        def steps() -> Any:
            if asks:
                ask_to_stop([FAILED], "stop/0", after=3)
            else:
                time.sleep(0.3)
            return [stop_asked("stop/0", step) for step in (2, 3, 4)]

        return steps

    found = together(monkeypatch, 2, {0: of_rank(False), 1: of_rank(True)})
    assert found == {0: [(), (FAILED,), (FAILED,)], 1: [(), (FAILED,), (FAILED,)]}


def test_the_first_rank_that_asks_to_stop_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks() -> Any:
        for after in (4, 5, 6):
            ask_to_stop([FAILED], "stop/0", after=after)
        return [stop_asked("stop/0", step) for step in (3, 4)]

    assert together(monkeypatch, 2, {1: asks}) == {1: [(), (FAILED,)]}


@pytest.mark.parametrize(("others", "patience"), [((1, 2), "60"), ((1,), "0.6")])
def test_rank_0_goes_last_and_waits_for_nobody_for_ever(
    monkeypatch: pytest.MonkeyPatch, others: tuple[int, ...], patience: str
) -> None:
    gone: list[int] = []

    def of_rank(rank: int) -> Any:
        def parts() -> None:
            time.sleep(0.05 * rank)
            gone.extend([rank] if rank else [])
            ranks.part("end/0")
            gone.extend([] if rank else [rank])

        return parts

    together(monkeypatch, 3, {rank: of_rank(rank) for rank in (0, *others)}, patience)
    assert gone == [*others, 0]


def test_trainings_of_one_rank_alone_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_trainings", itertools.count())
    assert [ranks.number_of_training() for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(ranks, "rank_and_world", lambda: (1, 2))
    assert [ranks.number_of_training() for _ in range(3)] == [0, 1, 2]


def test_nobody_asks_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert together(monkeypatch, 2, {0: lambda: stop_asked("stop/0", 9)}) == {0: ()}


@pytest.mark.parametrize(
    ("level", "ending"), [(Strict.NOTHING, []), (Strict.RUN, ["run"]), (Strict.ALL, ["run", "all"])], ids=str
)
def test_a_level_ends_what_it_says(level: Strict, ending: list[str]) -> None:
    problems = (Problem("run"), Problem("all", ends=Strict.ALL), Problem("none", ends=None))
    assert [problem.text for problem in Agreed(level, problems).ending] == ending


def test_rank_0_logs_all_and_the_others_their_own() -> None:
    everywhere, of_two = Problem("everywhere"), Problem("of two", ranks=(1, 3))
    one = Agreed(Strict.RUN, (everywhere, of_two))
    assert [one.of_rank(rank) for rank in (0, 1, 2)] == [[everywhere, of_two], [everywhere, of_two], [everywhere]]
