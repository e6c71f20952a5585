"""This Python: its flags, its ``.pth`` files and its packs; ``test_doctor`` has the kinds of TRL."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from pathlib import Path

import pytest

from trl_hotfix.commands.doctor.answer import Problems
from trl_hotfix.commands.doctor.environment import installed_packs, installed_trl, pth_files, this_python

from helpers.command_line import CHECKOUT


@pytest.mark.parametrize(("options", "expected"), [([], []), (["-s"], ["-s"]), (["-E", "-s"], ["-E", "-s"])])
def test_the_options_of_python_are_named(options: list[str], expected: list[str]) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "import json; from trl_hotfix.commands.doctor.environment import this_python; print(json.dumps(this_python()))"
    )
    # PYTHONSAFEPATH and PYTHONNOUSERSITE are such options, too.
    command = [sys.executable, *options, "-c", code]
    process = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    answer = json.loads(process.stdout)
    assert (answer["flags"], answer["executable"]) == (expected, sys.executable)
    assert answer["version"] == this_python()["version"]


def test_the_files_that_run_at_every_start_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("trl_hotfix_autoapply.pth", "another.pth", "no_path_file.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path), str(tmp_path)])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    assert [tuple(file.values()) for file in pth_files()] == [
        (str(tmp_path), "another.pth", False),
        (str(tmp_path), "trl_hotfix_autoapply.pth", True),
    ]


def test_packs_are_listed_without_being_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRL_HOTFIX_PACKS", raising=False)
    folder = tmp_path / "acme_trl_fixes-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-trl-fixes\nVersion: 1.2\n")
    (folder / "entry_points.txt").write_text("[trl_hotfix.packs]\nacme = acme_is_not_there\nbeta = acme_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_packs("beta") == [
        {"name": "acme", "release": "acme-trl-fixes==1.2", "named": False},
        {"name": "beta", "release": "acme-trl-fixes==1.2", "named": True},
    ]


def test_the_release_that_the_tests_run_on_is_supported() -> None:
    problems = Problems()
    answer = installed_trl(problems)
    assert (answer["version"], answer["supported"], answer["kind"]) == ("0.11.4", True, "release")
    assert Path(str(answer["folder"]), "trainer").is_dir()
    assert problems.entries == []


def test_metadata_without_a_package_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "trl-0.12.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.12.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    problems = Problems()
    assert installed_trl(problems)["folder"] is None
    assert [entry["problem"] for entry in problems.entries] == [
        "TRL 0.12.0 has metadata, but `import trl` finds no package"
    ]
