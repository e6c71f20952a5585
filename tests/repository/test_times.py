from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.times import Times

TIMED = Path(__file__).parents[2] / ".ci" / "timed"


def timed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(TIMED), *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_line_of_the_makefile_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    result = timed(tmp_path, "target=lint", "-c", "echo one two && exit 3")
    assert (result.stdout, result.returncode) == ("one two\n", 3)
    assert not (tmp_path / "build").exists()


def test_a_long_line_is_noted_with_its_target(tmp_path: Path) -> None:
    assert timed(tmp_path, "target=lint", "-c", "sleep 4").returncode == 0
    seconds, unit, target = (tmp_path / "build" / "times.txt").read_text().split()
    assert int(seconds) in (3, 4, 5), seconds
    assert (unit, target) == ("s", "lint")


def test_an_older_make_hands_over_no_target(tmp_path: Path) -> None:
    assert timed(tmp_path, "-c", "echo one").stdout == "one\n"


def test_a_run_adds_up_its_tests_by_folder_and_by_file() -> None:
    times = Times()
    for nodeid, seconds in (
        ("tests/unit/test_a.py::test_b", 1.0),
        ("tests/unit/test_a.py::test_c", 2.0),
        ("tests/docs/test_d.py::test_e", 5.0),
    ):
        times.pytest_runtest_logreport(
            pytest.TestReport(nodeid, ("", None, ""), {}, "passed", None, "call", duration=seconds)
        )
    assert [line.split() for line in times.lines()] == [
        ["5", "tests/docs"],
        ["3", "tests/unit"],
        ["5", "tests/docs/test_d.py"],
        ["3", "tests/unit/test_a.py"],
    ]
