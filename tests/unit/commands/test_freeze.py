"""``trl-hotfix freeze``: a file with the patches of this environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import CHECKOUT, ID, run, without_trl


def test_a_freeze_file_reproduces_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    process = run("freeze", "-o", str(file), TRL_HOTFIX_SKIP="dpo-eval-reference-from-trained-policy")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    frozen, listed = json.loads(file.read_text()), json.loads(run("list", "--json").stdout)
    assert frozen["digest"] != listed["digest"]
    reapplied = json.loads(run("list", "--json", TRL_HOTFIX_ONLY=f"@{file}").stdout)
    assert reapplied["digest"] == frozen["digest"]
    pending = [patch["id"] for patch in reapplied["patches"] if patch["state"] == "pending"]
    assert sorted(pending) == sorted(patch["id"] for patch in frozen["patches"])
    assert ID in pending
    assert [path.name for path in tmp_path.iterdir()] == ["set.json"]


def test_freeze_prints_what_it_would_write(tmp_path: Path) -> None:
    process = run("freeze")
    run("freeze", "-o", str(tmp_path / "set.json"))
    assert (tmp_path / "set.json").read_text() == process.stdout
    assert json.loads(process.stdout)["trl"] == "0.11.4"


def test_freeze_overwrites_only_with_force(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text("mine")
    process = run("freeze", "-o", str(file))
    assert (process.returncode, file.read_text()) == (2, "mine")
    assert "--force overwrites it" in process.stderr
    assert run("freeze", "--force", "-o", str(file)).returncode == 0
    assert json.loads(file.read_text())["digest"]


@pytest.mark.parametrize("path", ["no/such/folder/set.json", "."])
def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path, path: str) -> None:
    process = run("freeze", "--force", "-o", str(tmp_path / path))
    assert process.returncode == 2
    assert "cannot be written" in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.commands import freeze

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        freeze._write(tmp_path / "set.json", "text", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [None, "0.7.4"])
def test_freeze_without_a_supported_trl_writes_no_file(tmp_path: Path, version: str | None) -> None:
    path = os.pathsep.join([without_trl(tmp_path, version), str(CHECKOUT)])
    process = run("freeze", "-o", str(tmp_path / "set.json"), PYTHONPATH=path)
    assert (process.returncode, process.stdout) == (4, "")
    assert not (tmp_path / "set.json").exists()
