"""The matrix tests are run by ``--shard K/N`` only: each in one part, the same in every process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("number", range(40))
def test_heavy(number): pass

@pytest.mark.matrix
@pytest.mark.parametrize("number", range(40))
def test_of_the_same_process(number): pass

def test_light(): pass
"""


@pytest.fixture
def tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(CONFTEST.parent))
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_made_up=TESTS)
    return pytester


def heavy(tests: pytest.Pytester, shard: str) -> set[str]:
    """Return the matrix tests of a shard."""
    result = tests.runpytest("-m", "matrix", "--shard", shard, "--collect-only", "-q")
    return {line.partition("::")[2] for line in result.outlines if "::" in line}


def test_without_the_option_they_are_left_out_and_counted(tests: pytest.Pytester) -> None:
    result = tests.runpytest()
    result.assert_outcomes(passed=1, deselected=80)
    result.stdout.fnmatch_lines(["matrix tests: none", "80 matrix tests were left out: they need --shard 1/1 or*"])


def test_the_controller_of_two_workers_counts_them_too(tests: pytest.Pytester) -> None:
    result = tests.runpytest_subprocess("-n", "2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["80 matrix tests were left out: they need --shard 1/1 or*"])


def test_a_part_is_run_beside_the_others(tests: pytest.Pytester) -> None:
    count = len(heavy(tests, "3/20"))
    result = tests.runpytest("--shard", "3/20")
    result.assert_outcomes(passed=1 + count, deselected=80 - count)
    result.stdout.fnmatch_lines(["matrix tests: 3/20"])
    assert "left out" not in result.stdout.str()


def test_each_is_in_one_part(tests: pytest.Pytester) -> None:
    parts = [heavy(tests, f"{number}/4") for number in range(1, 5)]
    assert all(parts)
    assert sum(map(len, parts)) == 80
    assert set().union(*parts) == heavy(tests, "1/1")


def test_tests_of_one_process_are_in_one_part(tests: pytest.Pytester) -> None:
    part = heavy(tests, "2/7")
    assert part
    assert {name.replace("heavy", "of_the_same_process") for name in part if "heavy" in name} == {
        name for name in part if "heavy" not in name
    }


def test_only_what_is_selected_is_counted(tests: pytest.Pytester) -> None:
    result = tests.runpytest("-k", "heavy")
    result.stdout.fnmatch_lines(["40 matrix tests were left out*"])


@pytest.mark.parametrize("text", ["0/20", "21/20", "3", "3/0", "a/b", "-1/20", "3/20/1", ""])
def test_what_is_no_part_is_one_clear_error(tests: pytest.Pytester, text: str) -> None:
    result = tests.runpytest(f"--shard={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line == f"ERROR: --shard: expected K/N with K from 1 to N, such as 3/20; found {text!r}"
