"""A record keeps of the answers what the page and the ledger need, and a run replaces only what it has asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.relations import ledger
from trl_hotfix.relations.ledger import Finding

from bench.relations import asking, record
from bench.relations.ledger import not_seen, without_cause
from bench.releases import layout

NEWEST = layout.main_place(layout.releases()[-1])
METRICS = {"loss of step 2": 0.5, "rewards/chosen of step 1": 0.1, "rewards/margins of step 3": 0.2}


def answer(
    setting: str,
    apart: Mapping[str, float | None],
    *,
    trainer: str = "SFT",
    on: bool = True,
    state: str = "",
    why: str = "",
) -> dict[str, Any]:
    """Return an answer whose differences are so far apart."""
    differences = [{"what": what, "left": 1.23456, "right": 2.0, "apart": far} for what, far in apart.items()]
    cell = {"trainer": trainer, "relation": "padding", "setting": setting, "why": why, "differences": differences}
    cell["state"] = state or ("violated" if apart else "holds")
    return {"place": str(NEWEST), "on": on, "cell": cell, "seconds": 1.0, "ran": str(NEWEST)}


def written(answers: list[dict[str, Any]], folder: Path) -> Path:
    """Write the answers down, and return the file."""
    ((path, text),) = record.texts(answers, folder).items()
    path.write_text(text, encoding="utf-8")
    return path


def settings(path: Path) -> set[tuple[str, bool, str]]:
    return {(one["cell"]["trainer"], one["on"], one["cell"]["setting"]) for one in record.read(path)}


def test_the_largest_difference_has_its_numbers_and_the_others_their_beginnings(tmp_path: Path) -> None:
    (found,) = record.read(written([answer("a = b", METRICS)], tmp_path))
    first, *others = found["cell"]["differences"]
    assert first == {"what": "loss of step 2", "left": 1.235, "right": 2.0, "apart": 0.5}
    assert [(each["what"], each["left"]) for each in others] == [("rewards/", None)]


def test_what_is_not_finite_is_the_largest(tmp_path: Path) -> None:
    (found,) = record.read(written([answer("a = b", {**METRICS, "number of steps": None})], tmp_path))
    assert found["cell"]["differences"][0]["what"] == "number of steps"


def test_what_holds_and_what_cannot_be_asked_is_counted(tmp_path: Path) -> None:
    unasked = [answer(name, {}, state="cannot be asked", why="ValueError: no") for name in "ab"]
    failed = answer("c = d", {}, state="error", why="IndexError: (a.py:1)")
    path = written([answer("e", {}), answer("f", {}), answer("g", {}), *unasked, failed], tmp_path)
    cells = [one["cell"] for one in record.read(path)]
    assert [(cell["state"], cell["why"]) for cell in cells] == [
        *[("holds", "")] * 3,
        ("error", "IndexError: (a.py:1)"),
        *[("cannot be asked", "ValueError: no")] * 2,
    ]


def test_what_both_ways_have_stands_once(tmp_path: Path) -> None:
    both = [answer("a = b", METRICS, on=on) for on in (True, False)]
    path = written([*both, answer("c = d", METRICS, on=False)], tmp_path)
    violated = json.loads(path.read_text(encoding="utf-8"))["trainers"]["SFT"]["padding"]["violated"]
    assert {ways: list(facts) for ways, facts in violated.items()} == {"on off": ["a = b"], "off": ["c = d"]}
    assert settings(path) == {("SFT", True, "a = b"), ("SFT", False, "a = b"), ("SFT", False, "c = d")}


def test_a_run_replaces_only_the_trainers_and_the_way_that_it_has_asked(tmp_path: Path) -> None:
    every = [answer("old", METRICS, trainer=trainer, on=on) for trainer in ("SFT", "DPO") for on in (True, False)]
    written(every, tmp_path)
    assert settings(written([answer("new", METRICS)], tmp_path)) == {
        ("SFT", True, "new"),
        ("SFT", False, "old"),
        ("DPO", True, "old"),
        ("DPO", False, "old"),
    }


def test_the_ledger_finds_the_causes_in_a_record_that_it_finds_in_the_answers(tmp_path: Path) -> None:
    answers = [answer("a = b", METRICS), answer("c = d", {}, state="error", why="IndexError: (a.py:1)")]
    findings = [
        Finding("padding", ("SFT",), ("rewards/",), "It is so.", new="a-bug"),
        Finding("padding", ("SFT",), ("IndexError",), "It fails.", new="another"),
    ]
    for known in (answers, record.read(written(answers, tmp_path))):
        assert [one.what for one in without_cause(known, findings)] == ["loss of step 2"]
        assert not list(not_seen(known, findings))


def test_the_command_writes_only_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path / "relations")
    monkeypatch.setattr(asking, "ask", lambda works, jobs, console: [answer("a = b", METRICS)])
    arguments = ["--releases", NEWEST.release, "--trainers", "SFT", "--into", str(tmp_path / "answers.json")]
    path = tmp_path / "relations" / f"{NEWEST.release}.json"
    CliRunner().invoke(asking.command, arguments)
    assert not path.exists()
    CliRunner().invoke(asking.command, [*arguments, "--write"])
    assert settings(path) == {("SFT", True, "a = b")}
    monkeypatch.setattr(asking, "ask", lambda works, jobs, console: [answer("c = d", METRICS)])
    assert f"{path} has other answers" in CliRunner().invoke(asking.command, arguments).output


ON_RECORD = sorted(record.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", ON_RECORD, ids=lambda path: path.stem)
def test_a_record_is_of_its_release_and_as_the_command_writes_it(path: Path) -> None:
    answers = record.read(path)
    assert {one["place"] for one in answers} == {str(layout.main_place(path.stem))}
    assert record.text(answers) == path.read_text(encoding="utf-8")


def test_each_finding_of_the_ledger_is_seen_in_the_records_of_its_range() -> None:
    unseen = [f"{where}: {finding}" for where, finding in not_seen(record.read_all(), ledger.load())]
    assert unseen == []
