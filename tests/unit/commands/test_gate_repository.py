"""The gate of a repository of ten scripts, from red to green: comments, pyproject.toml, ``--ignore``, and repairs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.commands import scan
from trl_hotfix.commands.common import Exit

from helpers.command_line import runner

CORPUS = Path(__file__).parents[2] / "corpus"
SCRIPTS = (
    *("construction/partial_trainer.py", "construction/star_import.py", "construction/subclass_chain.py"),
    *("construction/notebook_sft.ipynb", "construction/no_trainer.py", "construction/import_module.py"),
    *("values/static_eval_split.py", "facts/accumulates_once.py", "ignores/of_what_cannot_be_told.py"),
    "values/formatting.py",
)
PACKED = "sft-padding-free-contamination"
TERMS = "dpo-padding-free-wrong-terms"
METRIC = "grpo-kl-metric-token-level"
FORMATTING = "sft-formatting-func-ignored"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TRL_HOTFIX")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(scan, "today", lambda: date(2026, 6, 1))
    (tmp_path / ".git").mkdir()
    for script in SCRIPTS:
        file = tmp_path / script
        file.parent.mkdir(exist_ok=True)
        shutil.copy(CORPUS / script, file)
    return tmp_path


def gate(folder: Path, *options: str) -> tuple[Any, dict[str, set[str]]]:
    """Return the exit code of the gate, and the scripts that each bug hits."""
    versions = ["--with", "transformers==4.45.2", "--with", "peft==0.15.2", "--with", "deepspeed==0.19.8"]
    command = [str(folder), "--trl", "0.19.1", *versions, *options]
    code = runner().invoke(scan.command, command, standalone_mode=False).return_value
    answer = json.loads(runner().invoke(scan.command, [*command, "--json"]).stdout)
    hits: dict[str, set[str]] = {}
    for file in answer["files"]:
        for bug in (bug for trainer in file["trainers"] for bug in trainer["hits"]):
            hits.setdefault(bug["id"], set()).add(Path(file["file"]).name)
    return code, hits


def comment(file: Path, *bugs: str) -> None:
    file.write_text(f"{file.read_text()}# trl-hotfix: ignore[{', '.join(bugs)}] the paper has it\n")


def test_ignores_make_it_green_step_by_step(repository: Path) -> None:
    code, hits = gate(repository)
    assert code is Exit.DEGRADED
    assert hits.keys() >= {PACKED, TERMS, METRIC, FORMATTING}
    assert hits[PACKED] == {"partial_trainer.py", "notebook_sft.ipynb"}
    assert hits[TERMS] == {"import_module.py", "star_import.py"}

    comment(repository / "construction/import_module.py", TERMS)
    code, fewer = gate(repository)
    assert (code, fewer[TERMS]) == (Exit.DEGRADED, {"star_import.py"})

    if sys.version_info < (3, 11):
        options = [word for bug in hits for word in ("--ignore", bug)]
    else:
        entries = [f'{{id = "{bug}", reason = "old runs", review_by = "2027-03-01"}},' for bug in (PACKED, TERMS)]
        table = "\n".join(["[tool.trl-hotfix]", "ignore = [", *entries, "]", ""])
        (repository / "pyproject.toml").write_text(table)
        code, fewer = gate(repository)
        assert code is Exit.DEGRADED
        assert fewer.keys() == hits.keys() - {PACKED, TERMS}
        options = [word for bug in fewer for word in ("--ignore", bug)]
    assert gate(repository, *options[:-2])[0] is Exit.DEGRADED
    assert gate(repository, *options) == (Exit.FINE, {})


def test_a_gate_for_what_a_run_does_not_repair_is_green_with_the_repairs_on(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gate(repository, "--fail-on", "unrepaired")[0] is Exit.DEGRADED
    monkeypatch.setenv("TRL_HOTFIX", "1")
    monkeypatch.setenv("TRL_HOTFIX_SKIP", TERMS)
    assert gate(repository, "--fail-on", "unrepaired")[0] is Exit.DEGRADED
    monkeypatch.delenv("TRL_HOTFIX_SKIP")
    code, hits = gate(repository, "--fail-on", "unrepaired")
    assert code is Exit.FINE
    assert hits.keys() >= {PACKED, TERMS}
    assert gate(repository)[0] is Exit.DEGRADED


def test_an_ignore_without_a_finding_is_named(repository: Path) -> None:
    file = repository / "facts/accumulates_once.py"
    comment(file, PACKED)
    result = runner().invoke(scan.command, [str(file), "--trl", "0.19.1", "--fail-on", "never"])
    assert f"the ignore of {PACKED} has no finding; take it out" in " ".join(result.output.split())
