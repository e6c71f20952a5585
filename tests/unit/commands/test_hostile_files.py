"""``scan`` and ``audit`` end, whatever they are given: within some seconds and megabytes, and with an honest answer.

The bounds are those of a process, which the system ends. Nothing is compared with a clock, since a machine may be slow:
``tests/unit/scanning/test_budget.py`` counts the steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from helpers import forked_commands
from helpers.command_line import CHECKOUT
from helpers.hostile_files import Hostile, audited, scanned

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it bounds a process as Linux does")

CPU_SECONDS = 2
ON_A_SLOW_MACHINE = 3 * CPU_SECONDS
BYTES = 200_000_000
"""What a command may take on top of what an idle one has."""

# To make a file smaller that fails takes as long as to find it.
_PHASES = [Phase.explicit, Phase.generate]
SOME = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), phases=_PHASES)
MANY = settings(SOME, max_examples=1_000)

Command = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRL_HOTFIX")}
    process = subprocess.Popen(
        [sys.executable, forked_commands.__file__, "-"],
        env={**kept, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def answer(case: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(case), file=stdin, flush=True)
        outcome: dict[str, Any] = json.loads(stdout.readline())
        return outcome

    yield answer
    stdin.close()
    process.wait()


def check(command: Command, folder: Path, hostile: Hostile, cpu_seconds: int) -> None:
    file = folder / hostile.name
    file.write_text(hostile.text, encoding="utf-8", errors="surrogateescape")
    words = {"BAD": str(file), "FOLDER": str(folder)}
    arguments = [words.get(word, word) for word in hostile.words.split()]
    outcome = command({"arguments": arguments, "bytes": BYTES, "cpu_seconds": cpu_seconds})
    file.unlink()
    shown = f"{hostile.words}: {hostile.text[:300]!r}... ({len(hostile.text)}): {outcome['stderr'][-600:]}"
    assert outcome["code"] in (0, 1, 2), f"{outcome['code']}: {shown}"
    assert "Traceback" not in outcome["stderr"], shown
    assert outcome["code"] != 2 or len(outcome["stderr"]) < 1_000, shown
    if hostile.name == "a.py" and outcome["code"] != 2:
        assert "no trainer of TRL is made" not in outcome["stdout"], shown


@given(hostile=st.one_of(scanned(), audited()))
@settings(SOME)
def test_hostile_files_are_read_within_seconds_and_megabytes(
    hostile: Hostile, command: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(command, tmp_path_factory.mktemp("hostile"), hostile, ON_A_SLOW_MACHINE)


@pytest.mark.matrix
@given(hostile=st.one_of(scanned(), audited()))
@settings(MANY)
def test_a_thousand_hostile_files_are_read_within_seconds_and_megabytes(
    hostile: Hostile, command: Command, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(command, tmp_path_factory.mktemp("hostile"), hostile, CPU_SECONDS)
