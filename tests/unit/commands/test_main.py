"""The exit codes and messages that all commands share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import ID, run, without_trl


def test_an_unknown_option_in_a_variable_is_a_usage_error() -> None:
    process = run("list", TRL_HOTFIX_OPTIONS="grpo-loss-normalisation.normalization=global")
    assert process.returncode == 2
    assert "has no option 'normalization'; did you mean 'normalisation'?" in process.stderr


@pytest.mark.parametrize(
    "arguments", [("--lits",), ("lits",), ("list", "--jsn"), ("verify", "moe-aux-los"), ("--list", "extra")]
)
def test_wrong_usage_is_exit_2_with_one_clear_line(arguments: tuple[str, ...]) -> None:
    process = run(*arguments)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


def test_an_unknown_id_in_a_variable_is_exit_2() -> None:
    process = run("--list", TRL_HOTFIX_ONLY="moe-aux-loss-lost-under-deepsped")
    assert process.returncode == 2
    assert "unknown patch in TRL_HOTFIX_ONLY" in process.stderr
    assert f"did you mean '{ID}'?" in process.stderr


def test_an_invalid_manifest_is_exit_3_with_every_mistake(source: Path) -> None:
    manifest = source / "patches.yaml"
    text = manifest.read_text().replace("severity: wrong-gradient", "severity: bad", 1).replace("title:", "tittle:", 1)
    manifest.write_text(text)
    for arguments in (("--list",), ("list", "--json"), ("verify",)):
        process = run(*arguments, PYTHONPATH=str(source))
        assert process.returncode == 3
        assert "has 3 mistakes" in process.stderr
        assert "did you mean 'title'?" in process.stderr
        assert process.stderr.count("  line ") == 3
        assert process.stdout == ""


@pytest.mark.parametrize("name", ["proven.json", "patches.json"])
def test_a_damaged_data_file_is_exit_3_with_a_remedy(name: str, package: Path) -> None:
    (package / "data" / name).write_text("{")
    process = run("--list", PYTHONPATH=str(package.parent))
    assert process.returncode == 3
    assert f"{package / 'data' / name} cannot be read" in process.stderr
    assert "install trl_hotfix again" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("damaged", ["patches.yaml", "trl_hotfix/data/patches.json"])
def test_apply_with_an_invalid_manifest_changes_nothing(damaged: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("source" if damaged == "patches.yaml" else "package")
    folder = folder if damaged == "patches.yaml" else folder.parent
    (folder / damaged).write_text("- id: [")
    code = (
        "import sys, trl_hotfix\nbefore = list(sys.meta_path)\n"
        "try: trl_hotfix.apply()\nexcept trl_hotfix.HotfixError as error:\n"
        "    print(type(error).__name__, *(mistake.line for mistake in getattr(error, 'mistakes', ())))\n"
        "print(sys.meta_path == before)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    error = "CatalogueError 1" if damaged == "patches.yaml" else "DamagedError"
    assert process.stdout == f"{error}\nTrue\n", process.stderr


@pytest.mark.parametrize("version", [None, "0.7.4"])
@pytest.mark.parametrize("command", ["--list", "--verify"])
def test_no_supported_trl_is_exit_4(tmp_path: Path, version: str | None, command: str) -> None:
    process = run(command, PYTHONPATH=without_trl(tmp_path, version))
    assert process.returncode == 4, process.stderr


@pytest.mark.parametrize("command", [["list", "--all"], ["explain", "orpo-nan-gradient-near-certainty"]])
def test_piped_output_has_no_escapes_or_trailing_spaces(command: list[str]) -> None:
    process = run(*command)
    assert process.returncode == 0, process.stderr
    assert "\x1b" not in process.stdout
    assert [line for line in process.stdout.splitlines() if line != line.rstrip()] == []


def test_a_damaged_list_of_known_bugs_is_exit_3_and_keeps_no_patch_from_going_on(package: Path) -> None:
    (package / "data" / "known.json").write_text("[{")
    for arguments in (["list"], ["scan", "x.py"], ["compare", "0.16.1", "1.16.0"]):
        process = run(*arguments, PYTHONPATH=str(package.parent))
        assert process.returncode == 3, process.stderr
        assert f"{package / 'data' / 'known.json'} cannot be read" in process.stderr
    frozen = run("freeze", PYTHONPATH=str(package.parent))
    assert frozen.returncode == 0, frozen.stderr
    assert ID in frozen.stdout
    assert run("doctor", PYTHONPATH=str(package.parent)).returncode == 1
