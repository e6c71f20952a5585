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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import pytest

import breakages
import covered
import release

CHECKOUT = Path(__file__).parents[2]
SECONDS = 120.0


def run(files: list[str]) -> dict[str, Any]:
    """Return as killer ``tests`` if one of them fails."""
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={CHECKOUT}", *files])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ends with {code!r}")
    return {"killer": "tests" if code else "", "why": "a test fails" if code else ""}


def with_code(module: Any, source: str, files: list[str]) -> dict[str, Any]:
    exec(compile(source, module.__file__, "exec"), vars(module))
    return run(files)


def with_breakage(module: Any, wrappers: list[str], breakage: Any, files: list[str]) -> dict[str, Any]:
    with breakages.broken(module, wrappers, breakage):
        return run(files)


def answers(task: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give the answer about the patch as it is, with what the tests reach, then that about each mutant."""
    module, files = importlib.import_module(task["module"]), task["files"]
    reached = functools.partial(covered.reached, module, task["functions"], functools.partial(run, files))
    unbroken = release.alone(functools.partial(run, files), SECONDS)
    if isinstance(unbroken, str) or unbroken["killer"]:
        raise RuntimeError(f"without a mutant: {unbroken}")
    yield "", {**unbroken, "reached": release.alone(reached, SECONDS)}
    work = {name: functools.partial(with_code, module, source, files) for name, source in task["code"].items()}
    work |= {
        breakage.name: functools.partial(with_breakage, module, task["wrappers"], breakage, files)
        for breakage in breakages.breakages(task["targets"])
        if breakage.name in task["breakages"]
    }
    for name, judged in work.items():
        answer = release.alone(judged, SECONDS)
        yield name, {"killer": "time", "why": answer} if isinstance(answer, str) else answer


def main(out: str, task_file: str) -> None:
    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    # What the forks would import each: the tests of patches use both.
    import torch  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    Path(out).write_text(json.dumps(dict(answers(task))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
