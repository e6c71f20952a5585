"""A user's script is checked with the types of the package (``py.typed``), and its mistakes are found."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
BIN = CHECKOUT / ".venv-repository" / "bin"
SCRIPT = """\
import trl_hotfix

report = trl_hotfix.apply(skip=["grpo-dapo-normaliser"], strict=True)
names: list[str] = [status.patch.id for status in report]
digest: str = report.digest
callback = trl_hotfix.HotfixCallback()
try:
    trl_hotfix.revert("sft-aux-loss-counted-twice")
except trl_hotfix.UnknownPatchError as error:
    print(error)
with trl_hotfix.patched():
    print(trl_hotfix.status().digest)
"""
WRONG = """\
import trl_hotfix

report = trl_hotfix.apply(without=["grpo-dapo-normaliser"])
digest: int = trl_hotfix.status().digest
trl_hotfix.repair()
"""
CHECKERS = {
    "mypy": ["mypy", "--strict", "--no-incremental", "--python-version", "3.10"],
    "pyright": ["basedpyright", "--level", "error"],
}


def checked(checker: str, script: str, folder: Path) -> tuple[int, str]:
    """Check ``script`` as a user would, whose environment has the package and whose folder is another one."""
    program, *options = CHECKERS[checker]
    if not (BIN / program).is_file():
        pytest.fail(f"{BIN / program} is not there: `make lint-repository` sets it up")
    path = folder / "train.py"
    path.write_text(script, encoding="utf-8")
    # An editable installation of hatchling is a path that both checkers follow.
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard", "pythonVersion": "3.10"}))
    python = ["--python-executable" if checker == "mypy" else "--pythonpath", str(BIN / "python")]
    process = subprocess.run(
        [str(BIN / program), *options, *python, str(path)],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_script_has_no_error(checker: str, tmp_path: Path) -> None:
    code, output = checked(checker, SCRIPT, tmp_path)
    assert code == 0, output


@pytest.mark.parametrize("checker", CHECKERS)
def test_wrong_uses_are_errors(checker: str, tmp_path: Path) -> None:
    code, output = checked(checker, WRONG, tmp_path)
    assert code == 1, output
    lines = {int(line) for line in re.findall(r"train\.py:(\d+)[:\d]*.*error", output)}
    assert {3, 4, 5} <= lines, output
