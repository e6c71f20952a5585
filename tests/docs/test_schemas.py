"""The published schemas are those of the commands, and the output of each command has its declared type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trl_hotfix.commands.common import Exit
from trl_hotfix.commands.main import NAMES

from tools.pages import generate

CHECKOUT = Path(__file__).parents[2]
SCHEMAS = CHECKOUT / "docs" / "schemas"
ID = "moe-aux-loss-lost-under-deepspeed"
WITH = {
    "verify": ["--json", ID],
    "explain": ["--json", ID],
    "freeze": [],
    "scan": ["--json", str(CHECKOUT / "tests" / "launched" / "train_tiny.py")],
    "audit": ["--json", str(CHECKOUT / "bench" / "releases" / "stacks" / "tf4.44.txt"), "--trl", "0.11.4"],
    "compare": ["--json", "0.11.4", "1.16.0"],
    "diff": ["--json", "a.json", "b.json"],
    "status": ["--json", "a.json"],
    "relations": ["--json", "--trainer", "DPO", "--relation", "effects"],
    "check": ["--json", "--dry-run", str(CHECKOUT / "tests" / "launched" / "checked.py")],
    "fingerprint": ["--json", "--wheel", str(metadata.distribution("trl").locate_file(""))],
}
"""The arguments of commands for which ``--json`` is not enough. The installed TRL takes the place of a wheel."""


def command(name: str) -> Any:
    return import_module(f"trl_hotfix.commands.{name}")


ANSWERS = [name for name in NAMES if name != "run"]
WRITES = ("new", "pack")  # They write files: tests/unit/commands/test_new.py and test_pack.py
PRINTS = [name for name in ANSWERS if name not in WRITES]


def test_the_schemas_are_made_anew_from_the_commands() -> None:
    generated = {f"{name}.json": generate.as_text(schema) for name, schema in generate.schemas().items()}
    published = {path.name: path.read_text(encoding="utf-8") for path in SCHEMAS.glob("*.json")}
    assert published == generated, "`make schemas` writes docs/schemas/ again"
    assert sorted(generated) == sorted(f"{name}.json" for name in ANSWERS)


@pytest.mark.parametrize("name", PRINTS)
def test_what_is_printed_is_the_answer_that_is_declared(name: str, tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    for record in ("a.json", "b.json"):
        (tmp_path / record).write_text('{"trl": "0.11.4", "patches": []}')
    line = [sys.executable, "-m", "trl_hotfix", name, *WITH.get(name, ["--json"])]
    variables["PYTHONPATH"] = str(CHECKOUT)
    process = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode in (Exit.FINE, Exit.DEGRADED), process.stderr
    answer = msgspec.json.decode(process.stdout.encode(), type=command(name).Answer, strict=True)
    # msgspec leaves out fields that the type does not have. So this also checks that no other field is printed.
    assert json.loads(msgspec.json.encode(answer)) == json.loads(process.stdout)


def test_a_field_that_is_missing_or_of_another_type_is_no_answer() -> None:
    answer = command("verify").Answer
    for wrong in ({"trl_hotfix": "0.1.0", "trl": None}, {"trl_hotfix": "0.1.0", "trl": 1, "cells": []}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, answer)
