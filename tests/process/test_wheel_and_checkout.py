"""An installed wheel, whose evidence is condensed and whose proofs are packed, answers as the checkout does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trl_hotfix.catalogue import loading

if TYPE_CHECKING:
    from launched.environments import Environment

CHECKOUT = Path(__file__).parents[2]
TRAINED = "orpo-nan-gradient-near-certainty"
ANSWERS = """
import contextlib, io, json, sys
from trl_hotfix.commands.main import main

answers = {}
for arguments in json.load(open(sys.argv[1])):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(arguments)
    answers[" ".join(arguments)] = printed.getvalue()
print(json.dumps(answers))
"""
APPLIED = """
import json, sys
import trl_hotfix
from trl import ORPOTrainer, SFTTrainer

status = trl_hotfix.status()
print(json.dumps({patch.id: [patch.state.value, patch.reason.value] for patch in status.patches}))
"""


@pytest.fixture
def both(installed: Environment, editable: Environment) -> list[Environment]:
    return [installed, editable]


@pytest.fixture
def answers(both: list[Environment], tmp_path: Path) -> Callable[[list[list[str]]], list[dict[str, str]]]:
    """Return what the commands print, all in one process for each environment."""

    def ask(commands: list[list[str]]) -> list[dict[str, str]]:
        file = tmp_path / "commands.json"
        file.write_text(json.dumps(commands))
        processes = [environment.run("-c", ANSWERS, str(file), cwd=tmp_path) for environment in both]
        printed = [json.loads(process.stdout) for process in processes]
        assert all(answer for of_one in printed for answer in of_one.values()), processes[0].stderr
        return printed

    return ask


def test_they_are_two(both: list[Environment]) -> None:
    folders = [
        environment.code("import trl_hotfix; print(trl_hotfix.__path__[0])").stdout.strip() for environment in both
    ]
    assert folders == [str(both[0].packages / "trl_hotfix"), str(CHECKOUT / "trl_hotfix")]


def test_explain_tells_the_same(answers: Any) -> None:
    ids = [entry.id for entry in (*loading.load(), *loading.without_repair())]
    wheel, checkout = answers([["explain", *form, id_] for id_ in ids for form in ([], ["--json"])])
    assert wheel == checkout
    assert any(json.loads(text)["proofs"] for command, text in wheel.items() if "--json" in command)


def test_the_other_commands_tell_the_same(answers: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import ORPOConfig, ORPOTrainer\nORPOTrainer(args=ORPOConfig(beta=0.1))\n")
    wheel, checkout = answers(
        [
            ["--list"],
            ["list", "--all", "--json"],
            ["list", "--all", "--trl", "1.16.0", "--json"],
            ["scan", "--trl", "0.16.1", "--json", str(script)],
            ["compare", "0.16.1", "1.16.0", "--json"],
            ["freeze", "--trl", "0.16.1", "--with", "transformers==4.50.3"],
        ]
    )
    assert wheel == checkout


def test_doctor_counts_the_same(both: list[Environment]) -> None:
    wheel, checkout = (
        json.loads(environment.run("-m", "trl_hotfix", "doctor", "--json").stdout) for environment in both
    )
    for answer in (wheel, checkout):
        # Paths, and what of the evidence is there.
        for entry in answer["files"].values():
            del entry["path"], entry["sha256"]
        for name in ("folder", "python", "hook", "pth"):
            del answer[name]
    assert wheel == checkout
    assert wheel["problems"] == []


def test_the_same_patches_go_on(both: list[Environment]) -> None:
    wheel, checkout = (environment.code(APPLIED, TRL_HOTFIX="1") for environment in both)
    assert json.loads(wheel.stdout) == json.loads(checkout.stdout)
    assert "applied" in wheel.stdout


def test_verify_full_measures_the_same(both: list[Environment]) -> None:
    command = ("-m", "trl_hotfix", "verify", "--full", "--json", TRAINED)
    wheel, checkout = (environment.run(*command) for environment in both)
    assert json.loads(wheel.stdout) == json.loads(checkout.stdout), wheel.stderr
    (proof,) = json.loads(wheel.stdout)["proofs"]
    assert proof["verdict"] == "proven"


@pytest.mark.parametrize("damage", ["missing", "cut", "no archive"])
def test_a_damaged_archive_of_proofs_is_named_with_a_remedy(damage: str, own: Environment) -> None:
    archive = own.packages / "trl_hotfix" / "data" / "proofs.tar.bz2"
    content = archive.read_bytes()
    archive.unlink()
    if damage != "missing":
        archive.write_bytes(content[:30_000] if damage == "cut" else b"nothing")
    process = own.run("-m", "trl_hotfix", "verify", "--full", "moe-aux-loss-lost-under-deepspeed")
    assert process.returncode == 3
    assert re.search(rf"{re.escape(str(archive))} cannot be read .*; install trl_hotfix again\n\Z", process.stderr)
