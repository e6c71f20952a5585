"""A check in a process of its own, and the answer that it gives line by line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from . import environment
from .answers import Answer
from .not_checked import NOT_CHECKED

PACKAGE = __package__.partition(".")[0]
Seen = Callable[[Sequence[Mapping[str, Any]]], None]
"""Takes the lines so far."""


def checked(
    task: Mapping[str, Any],
    trl: str,
    *,
    python: str = sys.executable,
    path: str = "",
    see: Seen = lambda lines: None,
) -> Answer:
    """Return the answer for a script. ``path`` is the search path of its process. The current folder is the script's.

    If the script fails on the few rows of a dataset that it loads, it gets all of them.
    """
    begin = time.monotonic()
    answer = _once({**task, "whole": False}, trl, python, path, see)
    if answer["error"] is not None and answer["trainer"] is None and answer["cut"]:
        answer = _once({**task, "whole": True}, trl, python, path, see)
    answer["seconds"] = round(time.monotonic() - begin, 1)
    return answer


def _once(task: Mapping[str, Any], trl: str, python: str, path: str, see: Seen) -> Answer:
    answer: Answer = {
        "trl_hotfix": __version__,
        "trl": trl,
        "script": task["script"],
        "trainer": None,
        "of_trl": None,
        "place": None,
        "error": None,
        "cut": False,
        "taken": [],
        "noted": [],
        "not_checked": list(NOT_CHECKED),
        "would_ask": [],
        "bugs": [],
        "relations": [],
        "runs": 0,
        "seconds": 0.0,
    }
    with tempfile.TemporaryDirectory(prefix="check-") as made:
        # A link in its path would make every file in it stand elsewhere.
        folder = Path(made).resolve()
        for name in ("work", "out"):
            (folder / name).mkdir()
        environment.mirror(Path.cwd(), folder / "work")
        for line in _run({**task, "folder": str(folder / "work")}, folder, python, path, see):
            _take(answer, line)
    return answer


def _take(answer: Answer, line: dict[str, Any]) -> None:
    kind = line.pop("kind")
    if kind == "trainer":
        answer.update(line)  # type: ignore[typeddict-item]
    elif kind == "relation":
        answer["relations"].append(line)  # type: ignore[arg-type]
    elif kind in ("taken", "noted"):
        answer[kind].append(line["text"])  # type: ignore[literal-required]
    elif kind == "would":
        answer["would_ask"].append(line)  # type: ignore[arg-type]
    elif kind == "error":
        answer["error"], answer["cut"] = line["text"], line.get("cut", False)
    elif kind == "runs":
        answer["runs"] = line["count"]


def _run(task: dict[str, Any], folder: Path, python: str, path: str, see: Seen) -> list[dict[str, Any]]:
    """Run the check, and return its lines."""
    file, out = folder / "out" / "task", folder / "out" / "lines"
    file.write_text(json.dumps(task), encoding="utf-8")
    out.touch()
    variables = {**environment.of_process(offline=not task["online"]), "PYTHONPATH": path}
    with (folder / "out" / "log").open("w+b") as log:
        process = subprocess.Popen(
            [python, "-m", f"{PACKAGE}.checking.inside", str(out), str(file)],
            env=variables,
            cwd=task["folder"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # With its forks it is a group, so an interrupt ends all of them.
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                see(_lines(out))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = _lines(out)
        log.seek(0)
        printed = log.read()
    if process.returncode and not any(line["kind"] == "error" for line in lines):
        last = (printed.decode(errors="replace").strip().splitlines() or ["nothing on standard error"])[-1]
        lines.append({"kind": "error", "text": f"the process ended with code {process.returncode}: {last}"})
    if task.get("log"):
        Path(task["log"]).write_bytes(printed)
    return lines


def _lines(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
