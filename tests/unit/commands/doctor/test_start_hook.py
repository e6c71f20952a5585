"""A fresh Python with ``TRL_HOTFIX=1``: what it prints is data of other programs as well."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import trl_hotfix
from trl_hotfix.commands.doctor.answer import Problems
from trl_hotfix.commands.doctor.start_hook import start_hook

PACKAGE = Path(trl_hotfix.__file__).parent

SITECUSTOMIZE = """
import sys
print("a banner of another program")
print("a secret of another program", file=sys.stderr)
print("trl_hotfix: a message", file=sys.stderr)
"""


@pytest.fixture
def fresh_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder on the path of the fresh Python, after which the package that is tested comes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PACKAGE.parent)]))
    return tmp_path


def test_only_our_lines_on_standard_error_are_kept(fresh_python: Path) -> None:
    (fresh_python / "sitecustomize.py").write_text(SITECUSTOMIZE)
    problems = Problems()
    hook, finders = start_hook(problems)
    assert (hook["effective"], hook["said"], hook["problem"]) == (True, ["trl_hotfix: a message"], None)
    assert Path(str(hook["folder"])).samefile(PACKAGE)
    assert not [finder for finder in finders if "trl_hotfix" in finder]
    assert problems.entries == []


def test_a_python_that_ends_at_its_start_is_a_problem(fresh_python: Path) -> None:
    (fresh_python / "sitecustomize.py").write_text("import os; os._exit(7)\n")
    problems = Problems()
    hook, finders = start_hook(problems)
    assert (hook["effective"], hook["folder"], finders) == (False, None, [])
    (entry,) = problems.entries
    assert entry["problem"].endswith("does not wait for TRL; it said: no answer, exit code 7")


def test_a_python_that_does_not_end_is_a_problem(fresh_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh_python / "sitecustomize.py").write_text("import threading; threading.Event().wait()\n")
    monkeypatch.setitem(start_hook.__globals__, "SECONDS", 0.5)
    hook, _ = start_hook(Problems())
    assert [message.partition(":")[0] for message in hook["said"]] == ["TimeoutExpired"]


def test_another_copy_of_the_package_is_a_problem(fresh_python: Path) -> None:
    (fresh_python / "trl_hotfix").mkdir()
    (fresh_python / "trl_hotfix" / "__init__.py").write_text("")
    (fresh_python / "sitecustomize.py").write_text("import trl_hotfix\n")
    problems = Problems()
    start_hook(problems)
    folder = fresh_python / "trl_hotfix"
    assert any(f"a fresh Python takes trl_hotfix from {folder}" in entry["problem"] for entry in problems.entries)


def test_a_python_that_cannot_be_started_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    hook, _ = start_hook(Problems())
    assert [message.partition(":")[0] for message in hook["said"]] == ["FileNotFoundError"]
