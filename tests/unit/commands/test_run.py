"""``trl-hotfix run``: a command with the patches on, its exit code and its signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading

from helpers.command_line import CHECKOUT, ID, run, without_trl

HOOKED = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('TRL_HOTFIX')}))"


def test_run_passes_its_options_to_all_child_processes() -> None:
    process = run("run", "--skip", ID, "--", "sh", "-c", '"$0" -c "$1"', sys.executable, HOOKED)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {"TRL_HOTFIX": "1", "TRL_HOTFIX_SKIP": ID}


@pytest.mark.parametrize(
    ("arguments", "before", "value"),
    [
        ([], {}, "1"),
        (["--strict"], {}, "strict"),
        (["--strict-all"], {}, "strict-all"),
        (["--strict"], {"TRL_HOTFIX": "strict-all"}, "strict"),
        ([], {"TRL_HOTFIX": "strict-all"}, "strict-all"),
        (["--observe"], {}, "observe"),
        ([], {"TRL_HOTFIX": "observe"}, "observe"),
        (["--strict"], {"TRL_HOTFIX": "observe"}, "strict"),
        (["--observe"], {"TRL_HOTFIX": "strict"}, "observe"),
        ([], {"TRL_HOTFIX": "strict"}, "strict"),
        ([], {"TRL_HOTFIX": "0"}, "1"),
    ],
)
def test_run_is_on_strict_or_observes(arguments: list[str], before: dict[str, str], value: str) -> None:
    process = run("run", *arguments, sys.executable, "-c", HOOKED, **before)
    assert json.loads(process.stdout) == {"TRL_HOTFIX": value}


def test_the_command_waits_for_the_import_of_trl() -> None:
    code = "import sys; print([type(finder).__module__ for finder in sys.meta_path][0])"
    assert run("run", "--", sys.executable, "-c", code).stdout == "trl_hotfix.import_hooks\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only", ID[:-1]], f"did you mean '{ID}'?"),
        (["--only", ""], "--only names no patch"),
        (["--observe", "--strict"], "leave one out"),
        (["--only", "@/no/such.json"], "No such file"),
        (["--only", "@x.json", "--skip", ID], "leave --skip and --options out"),
        (["--skip", "x"], "unknown patch"),
        (["--options", "grpo-loss-normalisation.normalization=global"], "did you mean 'normalisation'?"),
        (["--packs", "nobodys"], "no pack 'nobodys'"),
        (["--sikp", "x"], "--skip"),
    ],
)
def test_run_checks_its_options_before_the_job_starts(arguments: list[str], expected: str) -> None:
    process = run("run", *arguments, "--", "echo", "started")
    assert (process.returncode, process.stdout) == (2, "")
    assert expected in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    "variable", ["TRL_HOTFIX", "TRL_HOTFIX_CALLBACK", "TRL_HOTFIX_SKIP", "TRL_HOTFIX_UNKNOWN_BODY"]
)
def test_run_refuses_a_variable_that_the_job_would_refuse(variable: str) -> None:
    process = run("run", "--", "echo", "started", **{variable: "maybe"})
    assert (process.returncode, process.stdout) == (2, "")
    assert "'maybe'" in process.stderr


def test_run_refuses_a_variable_beside_a_freeze_file() -> None:
    process = run("run", "--only", "@x.json", "--", "echo", "started", TRL_HOTFIX_SKIP=ID)
    assert (process.returncode, process.stdout) == (2, "")
    assert "leave TRL_HOTFIX_SKIP out" in process.stderr


def test_run_without_a_command_is_a_usage_error() -> None:
    for arguments in ((), ("--",), ("--", "")):
        assert run("run", *arguments).returncode == 2


def revision(patch_id: str) -> int:
    return next(patch.revision for patch in loading.load() if patch.id == patch_id)


def test_run_finds_a_freeze_file_and_strict_checks_it(tmp_path: Path) -> None:
    frozen = CHECKOUT / "tests" / "frozen.tmp.json"
    try:
        frozen.write_text(run("freeze").stdout)
        process = run("run", "--only", f"@{frozen.name}", "--", sys.executable, "-c", HOOKED)
        assert json.loads(process.stdout)["TRL_HOTFIX_ONLY"] == f"@{frozen}"
    finally:
        frozen.unlink()
    record = {"patches": [{"id": "grpo-dapo-normaliser", "revision": revision("grpo-dapo-normaliser"), "options": {}}]}
    (tmp_path / "other.json").write_text(json.dumps(record))
    only = ("--only", f"@{tmp_path / 'other.json'}")
    assert run("run", *only, "--", "echo", "started").stdout == "started\n"
    process = run("run", "--strict", *only, "--", "echo", "started")
    assert (process.returncode, process.stdout) == (1, "")
    assert "grpo-dapo-normaliser: skipped (trl-version)" in process.stderr


def test_options_after_the_command_belong_to_it() -> None:
    assert run("run", "echo", "--list", "--verify", "--strict", "--", "-h").stdout == "--list --verify --strict -- -h\n"


def test_run_refuses_a_python_that_skips_the_hook() -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    start = f"import sys; sys.path[:0] = {[str(CHECKOUT), *sys.path]!r}\n"
    start += "from trl_hotfix.commands.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-S", "-c", start, "run", "--", "echo", "started"]
    process = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (1, "")
    assert "Python runs with -S" in process.stderr
    assert "The job was not started." in process.stderr


def test_run_without_trl_warns_and_runs(tmp_path: Path) -> None:
    path = os.pathsep.join([without_trl(tmp_path, None), str(CHECKOUT)])
    process = run("run", "--", "echo", "started", PYTHONPATH=path)
    assert (process.returncode, process.stdout) == (0, "started\n")
    assert "TRL is not installed" in process.stderr


# The process


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_run_has_the_exit_code_of_the_command(code: int) -> None:
    assert run("run", "--", "sh", "-c", f"exit {code}").returncode == code


def test_run_ends_by_the_signals_of_the_command() -> None:
    assert run("run", "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    # Python ignores SIGPIPE, and the command must not: writing to a closed pipe ends it.
    assert run("run", "--", "sh", "-c", "kill -PIPE $$; echo still here").returncode == -signal.SIGPIPE


def test_run_is_replaced_by_the_command() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trl_hotfix", "run", "--", "sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True
    )
    assert process.communicate()[0] == f"{process.pid}\n"


def test_a_command_that_cannot_start_has_the_code_of_a_shell(tmp_path: Path) -> None:
    process = run("run", "--", "no-such-command")
    assert (process.returncode, process.stderr.count("\n")) == (127, 1)
    assert "'no-such-command' is not found" in process.stderr
    (tmp_path / "data").write_text("no program")
    process = run("run", "--", str(tmp_path / "data"))
    assert (process.returncode, process.stderr.count("\n")) == (126, 1)
    assert "Permission denied" in process.stderr
