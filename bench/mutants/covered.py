"""Which lines and branches of a patch's wrappers are reached by its self-test, its proof and ``unaffected()``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


def reached(module: Any, functions: Collection[str], work: Callable[[], Any]) -> dict[str, Any]:
    """Return the branches and the lines in ``functions`` of a module that ``work`` reaches, and those that it misses.

    A branch is ``function: line -> line``. A negative line is the end of the function. The module is executed anew, in
    its own namespace, so that the functions that are measured are those that are used.
    """
    import coverage

    file = module.__file__
    measured = coverage.Coverage(data_file=None, branch=True, config_file=False, include=[file])
    before = sys.gettrace()
    measured.start()
    try:
        exec(compile(Path(file).read_text(encoding="utf-8"), file, "exec"), vars(module))
        work()
    finally:
        measured.stop()
        sys.settrace(before)
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        measured.json_report(morfs=[file], outfile=out.name)
        (report,) = json.load(out)["files"].values()
    parts = {name: part for name, part in report["functions"].items() if name.partition(".")[0] in functions}
    return {kind: _named(parts, kind) for kind in ("executed", "missing")}


def _named(parts: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    branches = [
        f"{name}: {' -> '.join(map(str, branch))}"
        for name, part in parts.items()
        for branch in part[f"{kind}_branches"]
    ]
    return branches + [f"{name}: {line}" for name, part in parts.items() for line in part[f"{kind}_lines"]]


def together(answers: Iterable[Mapping[str, Collection[str]]]) -> dict[str, Any]:
    """Return how many lines and branches there are, and those that are reached in none of several places."""
    answers = list(answers)
    executed = {name for answer in answers for name in answer["executed"]}
    missing = {name for answer in answers for name in answer["missing"]} - executed
    return {"total": len(executed | missing), "missed": sorted(missing)}
