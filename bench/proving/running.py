"""Run tasks in the Python of a place: the self-tests of patches, or a proof; two at a time, each with a time limit."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trl_hotfix.model import Patch

from bench.releases.layout import BENCH, Place

Answer = dict[str, Any]
Task = TypeVar("Task")
Result = TypeVar("Result")

GOOD = ("proven", "absent")


class Case(NamedTuple):
    """A patch in a place: what a cell or a proof is of."""

    patch: Patch
    place: Place

    @property
    def name(self) -> tuple[str, str]:
        """Return what can be in a set: a patch cannot."""
        return self.patch.id, str(self.place)


def process(place: Place, arguments: list[str], limit: float, *overlays: str, lines: int = 1) -> Answer | str:
    """Return what a module wrote to its ``{out}`` in a place, or why it wrote nothing, as ``answer_of``.

    ``arguments`` begin with ``-m`` and its name.
    """
    command, log = [str(place.python), *arguments], f"{arguments[1].rpartition('.')[2]}-{place}"
    return answer_of(command, place.environment(*overlays), limit, log, lines)


def answer_of(
    command: list[str], environment: Mapping[str, str], limit: float, log: str, lines: int = 1
) -> Answer | str:
    """Return what the process wrote to its ``{out}``, or why it wrote nothing, with the last lines of its errors."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        try:
            finished = subprocess.run(
                [str(out) if argument == "{out}" else argument for argument in command],
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {limit:g} s"
        file = BENCH / "logs" / f"{log}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{finished.stdout}\n{finished.stderr}")
        if not out.is_file():
            last = (finished.stderr.strip().splitlines() or ["nothing on standard error"])[-lines:]
            return f"the process ended with exit code {finished.returncode}: " + "\n".join(last)
        answer: Answer = json.loads(out.read_text())
        return answer


def lines_of(
    place: Place, module: str, task: Answer, limit: float, log: str, overlays: Iterable[str] = ()
) -> tuple[list[Answer], str]:
    """Return the answers of ``python -m MODULE OUT TASK.json`` in a place, one a line, and why there are no more.

    OUT is a file of its own, so that a process that dies leaves what it has.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, file = Path(folder, "out"), Path(folder, "task.json")
        file.write_text(json.dumps(task), encoding="utf-8")
        command = [str(place.python), "-m", module, str(out), str(file)]
        why = answer_of(command, place.environment(*overlays), limit, log, lines=5)
        lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    return [json.loads(line) for line in lines], str(why)


def is_kept(file: Path) -> bool:
    """Return whether a result is kept in ``file``. A failure is not: it may have been one of the machine."""
    return file.is_file() and json.loads(file.read_text())["verdict"] in GOOD


def in_parallel(
    name: str, tasks: list[Task], run: Callable[[Task], Iterable[Result]], jobs: int, console: Console
) -> list[Result]:
    """Return the results of all tasks, with a progress bar."""
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task(name if tasks else f"no {name} to run", total=len(tasks))
        futures = [pool.submit(run, task) for task in tasks]
        try:
            for future in as_completed(futures):
                for result in future.result():
                    results.append(result)
                    _report(result, console)
                progress.advance(bar)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def _report(result: Any, console: Console) -> None:
    if isinstance(result, dict) and result.get("verdict", "proven") not in GOOD:
        cell = f"{result['patch']} on {result['release']}@{result['stack']}"
        console.print(f"{result['verdict']}: {cell}: {result['why']}", markup=False, style="bold red")
