"""``scan`` as a gate: accepted findings, their dates of review, severities, and what the run repairs by itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trl_hotfix.commands import scan
from trl_hotfix.commands.common import Exit

DROPPED = "dpo-precomputed-ref-logps-dropped"
EXTRA_EOS = "dpo-extra-eos-conversational"
HIT = """\
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("gpt2")
args = DPOConfig(output_dir="out", precompute_ref_log_probs=True)
DPOTrainer(model=model, args=args).train()
"""
CLEAN = HIT.replace("=True", "=False")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRL_HOTFIX")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(scan, "today", lambda: date(2026, 6, 1))


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(scan.command, [*map(str, arguments), "--trl", "0.12.2"], standalone_mode=False)


def answer(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    (tmp_path / ".git").mkdir()

    def written(text: str, name: str = "train.py") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return written


def table(*entries: str) -> str:
    return (
        "[tool.other]\nx = 1\n\n[tool.trl-hotfix]\nignore = [\n"
        + "".join(f"  {{{entry}}},\n" for entry in entries)
        + "]\n"
    )


def test_a_repository_of_ten_scripts_goes_from_red_to_green(write: Write, tmp_path: Path) -> None:
    for number in range(8):
        write(CLEAN, f"clean_{number}.py")
    in_script, in_project = write(HIT, "old.py"), write(HIT, "runs/sweep.py")
    red = run(tmp_path)
    assert red.return_value is Exit.DEGRADED
    assert red.output.count(f"  hit  {DROPPED}") == 2
    in_script.write_text(HIT + f"# trl-hotfix: ignore[{DROPPED}] the paper used it\n")
    assert run(tmp_path).return_value is Exit.DEGRADED
    write(table(f'id = "{DROPPED}", reason = "a sweep of old runs", review_by = "2027-03-01"'), "runs/pyproject.toml")
    green = run(tmp_path)
    assert green.return_value is Exit.FINE
    assert "  hit  " not in green.output
    text = " ".join(green.output.split())
    assert green.output.count(f"  accepted  {DROPPED}\n") == 2
    assert f"the paper used it (hit; {in_script}, line 7)" in text
    assert f"a sweep of old runs (hit; {tmp_path / 'runs/pyproject.toml'}, line 6)" in text
    (trainer,) = answer(in_project)["files"][0]["trainers"]
    assert not trainer["hits"]
    (only,) = trainer["accepted"]
    assert (only["id"], only["answer"], only["reason"]) == (DROPPED, "hit", "a sweep of old runs")


def test_an_option_accepts_too_and_what_cannot_be_told_as_well(write: Write) -> None:
    file = write(HIT)
    assert run(file, "--ignore", DROPPED).return_value is Exit.FINE
    (trainer,) = answer(file, "--ignore", DROPPED, "--ignore", EXTRA_EOS)["files"][0]["trainers"]
    assert [(bug["id"], bug["answer"]) for bug in trainer["accepted"]] == [
        (DROPPED, "hit"),
        (EXTRA_EOS, "cannot tell"),
    ]
    assert EXTRA_EOS not in {bug["id"] for bug in trainer["cannot_tell"]}


def test_only_a_comment_accepts(write: Write) -> None:
    comment = f"# trl-hotfix: ignore[{DROPPED}] why"
    assert run(write(f"x = '{comment}'\n{HIT}")).return_value is Exit.DEGRADED
    behind = HIT.replace("_probs=True)\n", f"_probs=True)  {comment}\n")
    assert run(write(behind)).return_value is Exit.FINE
    cells = [{"cell_type": "code", "source": f"!pip install x\n{comment}\n"}, {"cell_type": "code", "source": HIT}]
    book = write(json.dumps({"cells": cells}), "book.ipynb")
    (trainer,) = answer(book)["files"][0]["trainers"]
    assert trainer["accepted"][0]["accepted_by"] == f"{book}, cell 1, line 2"
    config = write(f"precompute_ref_log_probs: true  # trl-hotfix: ignore[{DROPPED}] why\n", "dpo.yaml")
    (trainer,) = answer(config, "--trainer", "DPO")["files"][0]["trainers"]
    assert [bug["id"] for bug in trainer["accepted"]] == [DROPPED]


def test_an_ignore_without_a_finding_is_named_and_fails_nothing(write: Write) -> None:
    file = write(CLEAN + f"# trl-hotfix: ignore[{DROPPED}] why\n")
    result = run(file)
    assert f"{file}, line 7: the ignore of {DROPPED} has no finding; take it out" in result.output
    assert result.return_value is Exit.FINE
    (problem,) = answer(file)["ignores"]
    assert (problem["id"], problem["problem"], problem["file"], problem["line"]) == (
        DROPPED,
        "no finding",
        str(file),
        7,
    )
    assert "::warning" in run(file, "--format", "github").output
    (problem,) = answer(write(CLEAN), "--ignore", DROPPED)["ignores"]
    assert (problem["file"], problem["line"]) == (None, None)
    # With a higher severity it is not known whether it has a finding.
    assert answer(write(CLEAN), "--ignore", EXTRA_EOS, "--severity", "wrong-gradient")["ignores"] == []


def test_an_ignore_whose_review_is_due_fails_the_gate(write: Write) -> None:
    file = write(HIT)
    project = write(table(f'id = "{DROPPED}", reason = "later", review_by = 2026-05-31'), "pyproject.toml")
    result = run(file)
    assert result.return_value is Exit.DEGRADED
    assert f"{project}, line 6: the ignore of {DROPPED} was due for review on 2026-05-31 (later)" in result.output
    assert run(file, "--fail-on", "unknown").return_value is Exit.DEGRADED
    assert run(file, "--fail-on", "never").return_value is Exit.FINE
    assert "::error" in run(file, "--format", "github").output
    (log,) = json.loads(run(file, "--format", "sarif").stdout)["runs"]
    due = [made for made in log["results"] if made["ruleId"] == "ignore-review-due"]
    assert [made["locations"][0]["physicalLocation"]["region"]["startLine"] for made in due] == [6]
    assert log["tool"]["driver"]["rules"][due[0]["ruleIndex"]]["id"] == "ignore-review-due"
    write(table(f'id = "{DROPPED}", reason = "later", review_by = 2026-06-01'), "pyproject.toml")
    assert run(file).return_value is Exit.FINE


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        (f"ignore[{DROPPED[:-1]}] x", f"unknown bug {DROPPED[:-1]!r}; did you mean {DROPPED!r}?"),
        ("ignore[qqq] x", "unknown bug 'qqq'; `trl-hotfix list --all` shows every id"),
        (f"ignore[{DROPPED}]", "the reason is missing; expected # trl-hotfix: ignore[ID] reason"),
        ("ignore", "which bug is not there"),
        ("ignore[] x", "which bug is not there"),
    ],
)
def test_a_wrong_comment_is_one_clear_error_with_file_and_line(write: Write, comment: str, expected: str) -> None:
    file = write(f"{HIT}# trl-hotfix: {comment}\n")
    message = run(file).exception.format_message()
    assert message.startswith(f"{file}, line 7: ignore: {expected}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (table('id = "dpo", reason = "x", review_by = "2027-01-01"'), "line 6: ignore: unknown bug 'dpo'"),
        (table(f'id = "{DROPPED}", review_by = "2027-01-01"'), "line 6: ignore: the reason of"),
        (table(f'id = "{DROPPED}", reason = "x"'), f"line 6: ignore: '{DROPPED}' needs the day of its review"),
        (table(f'id = "{DROPPED}", reason = "x", review_by = "soon"'), "needs the day of its review"),
        (table(f'id = "{DROPPED}", reason = "x", until = "2027-01-01"'), "has 'until'; expected {id"),
        (table('reason = "x"'), "line 5: ignore: an entry has no id"),
        ("[tool.trl-hotfix]\nignore = 1\n", "line 2: ignore is no list"),
        ("[tool.trl-hotfix]\nskip = []\n", "line 2: [tool.trl-hotfix] has no setting 'skip'; expected ignore"),
        ("[tool.trl-hotfix\n", "is no TOML"),
    ],
)
def test_a_wrong_table_is_one_clear_error_with_file_and_line(write: Write, text: str, expected: str) -> None:
    file, project = write(HIT), write(text, "pyproject.toml")
    message = run(file).exception.format_message()
    assert message.startswith(str(project))
    assert expected in message
    assert "\n" not in message


def test_without_a_parser_of_toml_the_table_is_one_clear_error(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(HIT)
    write(table(f'id = "{DROPPED}", reason = "x", review_by = "2027-01-01"'), "pyproject.toml")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert "which needs Python 3.11; use comments or --ignore here" in run(file).exception.format_message()


def test_an_ignore_of_the_project_may_be_for_another_file(write: Write) -> None:
    project = write(table(f'id = "{DROPPED}", reason = "x", review_by = "2027-01-01"'), "pyproject.toml")
    expected = f"{project}, line 6: the ignore of {DROPPED} has no finding in these files"
    assert expected in run(write(CLEAN)).output
    assert run(write(CLEAN)).return_value is Exit.FINE


def test_a_table_above_the_repository_does_not_count(write: Write, tmp_path: Path) -> None:
    write(table(f'id = "{DROPPED}", reason = "x", review_by = "2027-01-01"'), "pyproject.toml")
    file = write(HIT, "within/train.py")
    assert run(file).return_value is Exit.FINE
    # A pyproject.toml without the table is of a part of the project.
    write("[project]\nname = 'x'\n", "within/pyproject.toml")
    assert run(file).return_value is Exit.FINE
    (tmp_path / "within/.git").mkdir()
    assert run(file).return_value is Exit.DEGRADED


def test_a_hit_that_the_run_would_repair_does_not_fail(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(HIT)
    off = run(file, "--fail-on", "unrepaired")
    assert off.return_value is Exit.DEGRADED
    assert "TRL_HOTFIX is not on here" in off.output
    monkeypatch.setenv("TRL_HOTFIX", "1")
    on = run(file, "--fail-on", "unrepaired", "--with", "transformers==4.46.3")
    assert on.return_value is Exit.FINE
    assert "(wrong-gradient, data; this run repairs it)" in on.output
    assert run(file).return_value is Exit.DEGRADED
    monkeypatch.setenv("TRL_HOTFIX_SKIP", DROPPED)
    assert run(file, "--fail-on", "unrepaired").return_value is Exit.DEGRADED
    monkeypatch.delenv("TRL_HOTFIX_SKIP")
    monkeypatch.setenv("TRL_HOTFIX_ONLY", EXTRA_EOS)
    assert run(file, "--fail-on", "unrepaired").return_value is Exit.DEGRADED
    monkeypatch.setenv("TRL_HOTFIX_ONLY", DROPPED)
    assert run(file, "--fail-on", "unrepaired").return_value is Exit.FINE
    monkeypatch.setenv("TRL_HOTFIX", "observe")
    assert run(file, "--fail-on", "unrepaired").return_value is Exit.DEGRADED


def test_a_policy_says_what_the_run_repairs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.catalogue import loading

    file = write(HIT)
    revision = next(patch.revision for patch in loading.load() if patch.id == DROPPED)
    policy = write(json.dumps({"patches": [{"id": DROPPED, "revision": revision}]}), "policy.json")
    # The policy alone decides, whatever the environment has.
    monkeypatch.setenv("TRL_HOTFIX_SKIP", DROPPED)
    assert run(file, "--fail-on", "unrepaired", "--policy", policy).return_value is Exit.FINE
    (trainer,) = answer(file, "--policy", policy)["files"][0]["trainers"]
    assert [bug["run_repairs"] for bug in trainer["hits"]] == [True]
    policy.write_text('{"patches": []}')
    assert run(file, "--fail-on", "unrepaired", "--policy", policy).return_value is Exit.DEGRADED
    policy.write_text("[]")
    assert "policy.json" in str(run(file, "--policy", policy).exception)


def test_the_least_severity_that_counts(write: Write) -> None:
    file = write(HIT)
    (trainer,) = answer(file, "--severity", "wrong-gradient")["files"][0]["trainers"]
    assert {bug["severity"] for bug in (*trainer["hits"], *trainer["cannot_tell"])} == {"wrong-gradient"}
    (trainer,) = answer(file, "--severity", "wrong-loss")["files"][0]["trainers"]
    assert {bug["severity"] for bug in (*trainer["hits"], *trainer["cannot_tell"])} == {"wrong-gradient", "wrong-loss"}


def test_a_bug_has_one_severity_in_every_format(write: Write) -> None:
    file = write(
        "from trl import GRPOConfig as C, GRPOTrainer as T\n"
        "T('m', args=C('x', loss_type='grpo', beta=0.1, steps_per_generation=1, gradient_accumulation_steps=2))\n"
        "T('m', reward_funcs=len, args=C('x', steps_per_generation=1, gradient_accumulation_steps=2))\n"
    )

    def scanned(form: str) -> str:
        arguments = [str(file), "--trl", "1.0.0", "--format", form]
        return str(CliRunner().invoke(scan.command, arguments, standalone_mode=False).stdout)

    trainers = json.loads(scanned("json"))["files"][0]["trainers"]
    severities = {bug["id"]: bug["severity"] for trainer in trainers for bug in trainer["hits"]}
    assert len(set(severities.values())) > 1, severities
    assert "wrong-metric" in severities.values()
    expected = {
        name: "warning" if severity in ("wrong-metric", "wasted-compute") else "error"
        for name, severity in severities.items()
    }
    (log,) = json.loads(scanned("sarif"))["runs"]
    levels = {made["ruleId"]: made["level"] for made in log["results"] if made["level"] != "note"}
    assert levels == expected
    lines = [line for line in scanned("github").splitlines() if not line.startswith("::notice")]
    of_github = {line.partition("title=")[2].split(" ")[0]: line.split(" ")[0][2:] for line in lines}
    assert of_github == expected
    assert all(f"({severities[name]})" in line for name, line in zip(of_github, lines, strict=True))
    for name, severity in severities.items():
        assert f"  hit  {name}\n" in scanned("text")
        assert f"({severity}" in scanned("text")


def test_what_is_accepted_is_suppressed_in_sarif(write: Write) -> None:
    file = write(HIT + f"# trl-hotfix: ignore[{DROPPED}] why\n")
    (log,) = json.loads(run(file, "--format", "sarif", "--ignore", EXTRA_EOS).stdout)["runs"]
    found = {made["ruleId"]: made["suppressions"] for made in log["results"] if "suppressions" in made}
    assert found == {
        DROPPED: [{"kind": "inSource", "justification": f"why ({file}, line 7)"}],
        EXTRA_EOS: [{"kind": "external", "justification": "--ignore (--ignore)"}],
    }
