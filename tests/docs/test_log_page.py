"""docs/log.md has the log as real runs print it, and each event that the package can write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trl_hotfix.log import MESSAGE

from helpers import sharing
from tools import printed_logs

CHECKOUT = Path(__file__).parents[2]
TEXT = printed_logs.PAGE.read_text(encoding="utf-8")
RUNS = printed_logs.of_the_pages()
EVENTS = re.compile(r"(?:\bevent\(|\bwarn\(.*, |\btell\(.*, )\"([a-z-]+)\"(?: if \w+ else \"([a-z-]+)\")?")
COMPUTED = {"applied", "observed", "training", "evaluating", MESSAGE, "hit"}
"""Events whose names stand in no call: states, activities, and what a line without an event has."""


def shape(line: str) -> str:
    """Return a line without its numbers and lists of ids: these change with the catalogue."""
    line = re.sub(r"digest [0-9a-f]{16}", "digest D", line)
    line = re.sub(r"(cannot tell|not repaired|on and not acted) \d+( more)?: [\w/, -]+", r"\1 IDS", line)
    return re.sub(
        r"\bnone of (the )?\d+ known bugs?", "none of N known bugs", re.sub(r"\d+ repairs?\b", "N repairs", line)
    )


def test_a_clean_run_and_a_hit_of_each_trainer_are_printed() -> None:
    found = {(run.trainer, any("hits none of" in line for line in run.lines)) for run in RUNS}
    assert found == {(trainer, is_clean) for trainer in ("SFT", "DPO", "GRPO") for is_clean in (True, False)}
    assert all(run.place.startswith("1.16.0@") for run in RUNS)
    for run in RUNS:
        begin, *_, end = run.lines
        assert re.fullmatch(r"trl_hotfix: INFO: \d+ repairs on for (\w+), digest \w{16}", begin)
        assert end.startswith("trl_hotfix: INFO: this run")


@pytest.mark.parametrize("number", sharing.heavy(range(len(RUNS)), smoke=[1]))
def test_a_run_prints_what_the_page_says(number: int) -> None:
    run = RUNS[number]
    assert list(map(shape, printed_logs.printed(run))) == list(map(shape, run.lines))


@pytest.mark.matrix
def test_the_events_of_a_run_are_those_of_the_list() -> None:
    clean, hit = (
        [json.loads(line) for line in printed_logs.printed(run, TRL_HOTFIX_LOG_FORMAT="json")] for run in RUNS[:2]
    )
    assert [line["event"] for line in clean] == ["repairs-on", "no-hit", "sum"]
    assert [line["event"] for line in hit] == ["repairs-on", *["hit-repaired"] * 2, *["repaired"] * 2, "sum"]
    head = {"time", "level", "logger", "rank", "pid", "message", "event"}
    for line in (line for line in (*clean, *hit) if line["event"] != "no-hit"):
        assert line.keys() - head == fields_of(line["event"])


def fields_of(event: str) -> set[str]:
    (fields,) = (fields for names, fields in events() if event in names)
    return set(re.findall(r"`(\w+)`", fields))


def events() -> list[tuple[list[str], str]]:
    """Return the names of each entry of the list, and the end of the entry, which has the fields."""
    text = TEXT.partition("<!-- events -->\n")[2]
    entries = re.findall(r"^- (`.*?):\s(.*(?:\n  .*)*)", text, re.MULTILINE)
    return [
        (re.findall(r"`([a-z-]+)`", names), " ".join(said.split()).partition(" With ")[2]) for names, said in entries
    ]


def test_each_event_is_in_the_list() -> None:
    sources = (CHECKOUT / "trl_hotfix").rglob("*.py")
    found = {name for path in sources for names in EVENTS.findall(path.read_text(encoding="utf-8")) for name in names}
    documented = {name for names, _ in events() for name in names}
    assert documented == (found - {""}) | COMPUTED
