"""``trl-hotfix status``: what a run reported, from its record and those of its ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import status
from trl_hotfix.commands.common import Exit
from trl_hotfix.selection.freeze_files import LARGEST

from helpers.command_line import ID, run

LONGEST_ID = max((patch.id for patch in loading.load()), key=len)
HIT = {
    "id": "grpo-dapo-normaliser",
    "severity": "wrong-gradient",
    "answer": "hit",
    "symptom": "the loss is wrong",
    "because": ["loss_type='dapo'", "steps_per_generation=4"],
    "unknown": [],
    "state": "applied",
    "reason": "proven",
}
DOUBT = {**HIT, "id": ID, "answer": "cannot tell", "because": [], "unknown": ["if the model is large"]}
REPAIRED = {"id": HIT["id"], "revision": 1, "options": {}, "word": "repaired", "called": 4, "acted": 3}


def record(**fields: Any) -> dict[str, Any]:
    versions = {"schema": 2, "trl": "0.23.0", "trl_hotfix": "0.1.0", "digest": "0123456789abcdef"}
    return {**versions, "patches": [REPAIRED], **fields}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def ask(path: Path, *options: str, columns: int = 80) -> Any:
    return CliRunner().invoke(
        status.command, [str(path), *options], standalone_mode=False, env={"COLUMNS": str(columns)}
    )


def test_a_repaired_run_is_fine(tmp_path: Path) -> None:
    write(tmp_path / "trl_hotfix.json", record(hits=[HIT, DOUBT]))
    result = ask(tmp_path)
    assert result.return_value is Exit.FINE
    assert "digest 0123456789abcdef" in result.output
    assert "repaired: 1\n  grpo-dapo-normaliser (r1): acted in 3 of 4 calls\n      bug: GRPO dapo loss" in result.output
    assert "      your run: loss_type='dapo', steps_per_generation=4\n" in result.output
    assert f"cannot tell: 1\n  {ID}: if the model is large\n" in result.output
    assert "NOT repaired" not in result.output


@pytest.mark.parametrize(
    "fields",
    [
        {"patches": [], "hits": [{**HIT, "state": "disabled", "reason": "excluded"}]},
        {"patches": [{**REPAIRED, "word": "selected"}], "hits": [HIT]},
        {"patches": [], "observed": [{**{key: HIT[key] for key in list(HIT)[:6]}, "called": {"a": 1}}]},
    ],
    ids=["left out", "for others", "observed"],
)
def test_a_hit_that_is_not_repaired_comes_first_and_is_exit_1(tmp_path: Path, fields: Any) -> None:
    write(tmp_path / "trl_hotfix.json", record(**fields))
    result = ask(tmp_path)
    assert result.return_value is Exit.DEGRADED
    assert result.output.split("\n\n")[1].startswith("hit by this run, and NOT repaired: 1\n  grpo-dapo-normaliser (")
    (retrain,) = (patch.retrain for patch in loading.load() if patch.id == "grpo-dapo-normaliser")
    assert f"train again? {retrain}" in " ".join(result.output.split())
    assert json.loads(ask(tmp_path, "--json").output)["fine"] is False


def test_what_an_observed_run_does_not_hit_is_left_out(tmp_path: Path) -> None:
    clear = {**{key: HIT[key] for key in list(HIT)[:6]}, "answer": "not hit"}
    write(tmp_path / "trl_hotfix.json", record(patches=[], observed=[clear]))
    assert ask(tmp_path).return_value is Exit.FINE
    assert "grpo-dapo-normaliser" not in ask(tmp_path).output


def test_what_was_warned_of_is_exit_1_and_is_said_once(tmp_path: Path) -> None:
    unreached = [{"id": "a-patch", "revision": 1, "reason": "made-before"}, {"id": "b", "revision": 1, "reason": "x"}]
    problem = "a-patch: unreached (made-before): a trainer was made before"
    write(tmp_path / "trl_hotfix.json", record(problems=[problem], unreached=unreached))
    result = ask(tmp_path)
    assert result.return_value is Exit.DEGRADED
    assert f"problems: 1\n  {problem}\n" in result.output
    assert "not reached: 1\n  b (r1): x\n" in result.output


def test_the_constructor_of_a_reverted_patch_has_repaired(tmp_path: Path) -> None:
    write(tmp_path / "trl_hotfix.json", record(patches=[], reverted=[REPAIRED], hits=[HIT]))
    assert ask(tmp_path).return_value is Exit.FINE


def test_all_records_of_a_run_are_told_by_rank(tmp_path: Path) -> None:
    write(tmp_path / "trl_hotfix.json", record())
    for rank in (10, 9):
        write(tmp_path / f"trl_hotfix.rank-{rank}.json", record(problems=[f"it failed on {rank}"]))
    write(tmp_path / "trl_hotfix.rank-x.json", "no record")
    answer = json.loads(ask(tmp_path, "--json").output)
    assert msgspec.convert(answer, status.Answer, strict=True)
    assert [(one["rank"], one["problems"]) for one in answer["records"]] == [
        (None, []),
        (9, ["it failed on 9"]),
        (10, ["it failed on 10"]),
    ]
    assert answer["fine"] is False
    assert "\n\nrank 9, " in ask(tmp_path, columns=160).output
    # A file is asked for alone.
    assert len(json.loads(ask(tmp_path / "trl_hotfix.rank-9.json", "--json").output)["records"]) == 1


def test_a_run_that_has_not_ended_has_the_record_of_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path / f"checkpoint-{step}" / "trl_hotfix.json", record(digest=f"of {step}"))
    (tmp_path / "checkpoint-11").mkdir()
    (one,) = json.loads(ask(tmp_path, "--json").output)["records"]
    assert one["digest"] == "of 10"
    assert one["path"].endswith("checkpoint-10/trl_hotfix.json")


def test_a_file_of_freeze_has_no_words(tmp_path: Path) -> None:
    file = write(tmp_path / "set.json", {"patches": [{"id": "a", "revision": 2, "options": {"x": "y"}}]})
    result = ask(file)
    assert result.return_value is Exit.FINE
    assert "on, without a word: 1\n  a (r2, x=y)\n" in result.output


@pytest.mark.parametrize("columns", [80, 60, 200])
def test_no_line_is_too_long_and_no_id_is_broken(tmp_path: Path, columns: int) -> None:
    words = ("repaired", "called", "standing by")
    ids = [patch.id for patch in loading.load()]
    patches = [{**REPAIRED, "id": name, "word": words[number % 3]} for number, name in enumerate(ids)]
    hits = [{**(HIT, DOUBT)[number % 2], "id": name, "symptom": "s " * 90} for number, name in enumerate(ids)]
    problems = [f"{name}: failed (self-test): {'some words ' * 20}" for name in ids]
    write(tmp_path / "trl_hotfix.json", record(patches=patches, hits=hits, problems=problems))
    lines = ask(tmp_path, columns=columns).output.splitlines()[1:]
    assert max(map(len, lines)) <= columns
    shown = {word.strip(":(),") for line in lines for word in line.split()}
    assert set(ids) <= shown
    assert not any(word.endswith("-") for word in shown)


# What is no record.


HOSTILE = "a\n\x1b[31m\u202eb"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "it is empty"),
        (" " * (LARGEST + 1), "it has more than 256 KiB"),
        ("{", "Expecting"),
        ("[]", "Expected `object`"),
        ("[" * 50_000, "it is nested too deeply"),
        ('{"patches": [], "schema": 99}', "its schema is 99"),
        ('{"patches": [], "patches": []}', "twice in one object"),
        ('{"patches": [], "hits": [{"id": 3}]}', "in its hits"),
        ('{"patches": [], "hits": [3]}', "Expected `object`"),
        ('{"patches": [], "observed": [{"answer": "hit"}]}', "in its hits"),
        ('{"patches": [], "run": "rm"}', "unknown field"),
    ],
)
def test_a_file_that_is_no_record_is_one_clear_line(tmp_path: Path, content: str, expected: str) -> None:
    file = write(tmp_path / "trl_hotfix.json", content)
    process = run("status", str(tmp_path))
    assert process.returncode == Exit.USAGE
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.isprintable()
    assert line.startswith("trl-hotfix: the record '")
    assert expected in line
    assert str(file) in line


def test_what_a_hostile_record_says_is_on_its_lines_without_control_characters(tmp_path: Path) -> None:
    entry = {**REPAIRED, "id": HOSTILE, "options": {HOSTILE: HOSTILE}}
    fields = dict.fromkeys(("trl", "trl_hotfix", "digest"), HOSTILE)
    hit = {**HIT, "id": HOSTILE, "because": [HOSTILE], "state": HOSTILE}
    lists = {
        "patches": [entry],
        "hits": [hit],
        "problems": [HOSTILE, "x" * 9000],
        "unreached": [{**entry, "reason": "y"}],
    }
    write(tmp_path / "trl_hotfix.json", record(**fields, **lists))
    result = ask(tmp_path)
    assert result.return_value is Exit.DEGRADED
    assert all(line.isprintable() for line in result.output.splitlines())
    assert json.loads(ask(tmp_path, "--json").output)["records"][0]["problems"][0] == HOSTILE


@pytest.mark.parametrize("name", ["missing", "missing\n\x1b[31m", "empty"])
def test_a_folder_without_a_record_is_one_clear_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty" / "checkpoint-1").mkdir(parents=True)
    process = run("status", str(tmp_path / name))
    assert process.returncode == Exit.USAGE
    line = process.stderr.splitlines()[-1]
    assert line.startswith("Error: ")
    assert line.isprintable()
    assert "output folder of a run" in line
    assert "Traceback" not in process.stderr


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trl_hotfix.json")
    process = run("status", str(tmp_path))
    assert process.returncode == Exit.USAGE
    assert "it is no regular file" in process.stderr


def test_a_long_problem_is_cut_on_the_screen_and_whole_in_the_json(tmp_path: Path) -> None:
    problem = "it failed: " + "word " * 50_000
    write(tmp_path / "trl_hotfix.json", record(problems=[problem]))
    screen = ask(tmp_path).output
    assert len(screen) < 5_000
    assert screen.rstrip().endswith("more)") or "more)" in screen
    assert json.loads(ask(tmp_path, "--json").output)["records"][0]["problems"] == [problem]
