"""Run in the environment of the tests: which mutants of one patch its own tests notice.

    python by_tests.py OUT.json TASK.json

The tests are the files of tests/unit/patches that use the patch's module. Each mutant runs in a fork.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import mutated
import pytest

import breakages
import covered
import release

CHECKOUT = Path(__file__).parents[2]


@dataclass
class Tests:
    """The tests that judge a patch."""

    files: list[str]

    def killer(self) -> tuple[str, str]:
        """Return ``tests`` if one of them fails, and that it does. Both are empty if none fails."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={CHECKOUT}"]
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
            code = pytest.main([*options, *self.files])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest ends with {code!r}")
        return ("tests", "a test fails") if code else ("", "")


def answers(task: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the answer about the patch as it is, with what the tests reach, then that about each mutant."""
    tests, module, wrappers = Tests(task["files"]), importlib.import_module(task["module"]), task["wrappers"]
    unbroken = mutated.in_fork(functools.partial(mutated.answered, tests))
    if unbroken["killer"]:
        raise RuntimeError(f"without a mutant: {unbroken['why']}")
    reached = functools.partial(covered.reached, module, task["functions"], tests.killer)
    yield "", {**unbroken, "reached": release.alone(reached, mutated.SECONDS)}
    work: dict[str, Callable[[], dict[str, Any]]] = {
        name: functools.partial(mutated.judged_code, tests, module, source) for name, source in task["code"].items()
    }
    work |= {
        breakage.name: functools.partial(mutated.judged_breakage, tests, module, wrappers, breakage)
        for breakage in breakages.breakages(task["targets"])
        if breakage.name in task["breakages"]
    }
    yield from ((name, mutated.in_fork(judged)) for name, judged in work.items())


def main(out: str, task_file: str) -> None:
    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    # Imported before the forks, each of which would import both.
    import torch  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    Path(out).write_text(json.dumps(dict(answers(task))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
