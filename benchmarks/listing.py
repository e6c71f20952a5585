"""Measure ``python -m trl_hotfix --list`` in a new process, and an idle Python. Files are in the disk cache.

Both run in the environment of the benchmarks, which has torch and TRL as a user's environment has.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import version
from typing import Any

from benchmarks import measure
from benchmarks.measure import Finding, Result

LIBRARIES = "import click, msgspec, packaging.specifiers, rich.table, yaml"
HEAVY = ("torch", "transformers", "trl", "wrapt")


def python(*arguments: str) -> dict[str, Any]:
    paths = {"PYTHONPATH": str(measure.CHECKOUT)}
    return measure.process([sys.executable, *arguments], measure.bare_environment(**paths))


def imported() -> list[str]:
    """Return the heavy packages that the command imports."""
    code = (
        "import json, sys\nfrom trl_hotfix.commands.main import main\ntry: main(['--list'])\nexcept SystemExit: pass\n"
        f"print(json.dumps({{'heavy': [name for name in {HEAVY!r} if name in sys.modules]}}))"
    )
    heavy: list[str] = python("-c", code)["heavy"]
    return heavy


def run(*, quick: bool) -> Result:
    heavy = imported()
    if heavy:
        raise RuntimeError(f"--list imported {', '.join(heavy)}: that is not --list as it is promised")
    commands = {"bare": ["-c", "pass"], "libraries": ["-c", LIBRARIES], "list": ["-m", "trl_hotfix", "--list"]}
    variants = {name: functools.partial(python, *arguments) for name, arguments in commands.items()}
    rounds = measure.run_rounds(variants, 8 if quick else 60)
    findings = [
        Finding("--list, over a bare Python", measure.difference(rounds, "list", "bare", "wall_ms"), "ms", 150.0),
        Finding("--list, CPU time", measure.difference(rounds, "list", "bare", "cpu_ms"), "ms"),
        Finding("its libraries alone", measure.difference(rounds, "libraries", "bare", "wall_ms"), "ms"),
    ]
    return Result(findings, {"rounds": measure.as_plain_data(rounds)}, {"trl": version("trl")})
