"""Run inside one release: the self-tests of patches, each in its own process with a time limit.

    python -m bench.proving.release OUT.json SECONDS ID...

TRL is imported once; each patch is verified in a fork of that process.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trl_hotfix.catalogue import loading
from trl_hotfix.matching.versions import installed
from trl_hotfix.model import Patch
from trl_hotfix.verification import cells

from bench.proving import calls

Subject = TypeVar("Subject")


def versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    libraries = {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers", "wrapt")}
    return {"python": platform.python_version(), **libraries}


def warm(patches: Sequence[Patch]) -> None:
    """Import what the cells will import. The cells themselves report a module that cannot be imported."""
    for module_name in dict.fromkeys(target.module for patch in patches for target in patch.targets):
        with contextlib.suppress(Exception):
            cells.imported(module_name)


def in_a_fork(work: Callable[[Subject], Any], subject: Subject, seconds: float) -> dict[str, Any] | str:
    """Return the answer of ``work`` in its own process, or why there is no answer."""

    def write_answer() -> None:
        out.write_text(json.dumps(work(subject)), encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        process = multiprocessing.get_context("fork").Process(target=write_answer)
        process.start()
        process.join(seconds)
        reason = f"the process ended with exit code {process.exitcode}"
        if process.is_alive():
            process.kill()
            process.join()
            reason = f"no answer within {seconds:g} s"
        if not out.is_file():
            return reason
        answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return answer


def alone(work: Callable[[], Any], seconds: float) -> dict[str, Any] | str:
    """Return the answer of ``work`` in its own process and working directory, or why there is no answer."""

    def in_folder(folder: str) -> Any:
        os.chdir(folder)
        return work()

    with tempfile.TemporaryDirectory() as folder:
        return in_a_fork(in_folder, folder, seconds)


def verified(patch: Patch) -> dict[str, Any]:
    """Return the cell of ``patch`` here, with what its self-test has called in TRL."""
    called: set[str] = set()
    before = threading.enumerate()
    with calls.recorded(called):
        cell = cells.verify(patch).to_dict()
    # A progress bar has one, and a job's log would have the bar.
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    if left:
        cell |= {"verdict": cells.CellVerdict.ERROR.value, "why": f"the self-test leaves threads: {', '.join(left)}"}
    return {**cell, "calls": sorted(called)}


def cell(patch: Patch, seconds: float) -> dict[str, Any]:
    answer = in_a_fork(verified, patch, seconds)
    if not isinstance(answer, str):
        return answer
    verdict = cells.CellVerdict.ERROR
    failed = cells.Cell(patch.id, patch.revision, installed("trl") or "", verdict, answer)
    return {**failed.to_dict(), "calls": []}


def main(out: str, seconds: str, *ids: str) -> None:
    patches = [patch for patch in loading.load() if patch.id in ids]
    warm(patches)
    answers = [cell(patch, float(seconds)) for patch in patches]
    Path(out).write_text(json.dumps({"versions": versions(), "cells": answers}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
