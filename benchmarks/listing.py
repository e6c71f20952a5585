"""``python -m trl_hotfix --list`` in a new process, beside a Python that does nothing. Files are in the disk's cache.

It runs in the environment that the benchmarks run in, which has torch and TRL, as a user's has.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import version
from typing import Any

import measure
from measure import Finding, Result

LIBRARIES = "import click, msgspec, packaging.specifiers, rich.table, yaml"
HEAVY = ("torch", "transformers", "trl", "wrapt")


def python(*arguments: str) -> dict[str, Any]:
    paths = {"PYTHONPATH": str(measure.CHECKOUT)}
    return measure.process([sys.executable, *arguments], measure.bare_environment(**paths))


def imported() -> list[str]:
    """Which of the heavy packages the command has imported."""
    code = (
        "import json, sys\nfrom trl_hotfix.commands.main import main\ntry: main(['--list'])\nexcept SystemExit: pass\n"
        f"print(json.dumps({{'heavy': [each for each in {HEAVY!r} if each in sys.modules]}}))"
    )
    heavy: list[str] = python("-c", code)["heavy"]
    return heavy


def run(*, quick: bool) -> Result:
    found = imported()
    if found:
        raise RuntimeError(f"--list imported {', '.join(found)}: that is not --list as it is promised")
    commands = {"bare": ["-c", "pass"], "libraries": ["-c", LIBRARIES], "list": ["-m", "trl_hotfix", "--list"]}
    variants = {name: functools.partial(python, *words) for name, words in commands.items()}
    done = measure.rounds(variants, 8 if quick else 60)
    findings = [
        Finding("--list, over a bare Python", measure.difference(done, "list", "bare", "wall_ms"), "ms", 150.0),
        Finding("--list, CPU time", measure.difference(done, "list", "bare", "cpu_ms"), "ms"),
        Finding("its libraries alone", measure.difference(done, "libraries", "bare", "wall_ms"), "ms"),
    ]
    return Result(findings, {"rounds": measure.spread(done)}, {"trl": version("trl")})
