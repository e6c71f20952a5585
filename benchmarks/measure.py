"""Measure variants side by side: they run in random order within a round, and their differences within it count.

A machine is never idle and its clock speed never constant. A slow period slows all variants of a round, so it hardly
affects the ratio or the difference within the round.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
WORK = CHECKOUT / "build" / "benchmarks"
LEVEL = 0.95

Sample = Mapping[str, Any]
"""The quantities that one run of one variant has, by name."""

Round = Mapping[str, Sample]
"""One sample of each variant. They are taken one right after the other."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of ``n`` values and an interval, which contains the true median with the probability ``coverage``."""

    median: float
    low: float
    high: float
    n: int
    coverage: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure. It should not exceed ``goal``, if there is a goal."""

    label: str
    estimate: Estimate
    unit: str = ""
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """``met`` or ``not met`` if this holds for the whole interval, else ``undecided``; empty without a goal."""
        if self.goal is None:
            return ""
        if self.estimate.coverage < LEVEL:
            return "undecided"
        if self.estimate.high <= self.goal:
            return "met"
        return "not met" if self.estimate.low > self.goal else "undecided"


@dataclass(slots=True)
class Result:
    """The findings of a benchmark, their samples, the versions, and ``summary``: what a page needs beside the findings.

    The samples are a hundred times as large as the rest, and nothing but this run reads them: they are not committed.
    """

    findings: list[Finding] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def run_rounds(
    variants: Mapping[str, Callable[[], Sample]], repetitions: int, *, seed: int = 0, warm_up: bool = True
) -> list[Round]:
    """Run ``repetitions`` rounds. Each has every variant once, in random order.

    With ``warm_up`` one more round comes first. It fills the caches and is discarded.
    """
    order = random.Random(seed)
    rounds: list[Round] = []
    for _ in range(repetitions + warm_up):
        names = list(variants)
        order.shuffle(names)
        rounds.append({name: variants[name]() for name in names})
    return rounds[warm_up:]


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median, and the narrowest pair of order statistics that contains it with 95 %.

    If there are too few values for that, the interval is their range. The values may have any distribution, but the
    rounds must be independent.
    """
    if not values:
        raise ValueError("an estimate needs at least one value, and there is none")
    ordered, n = sorted(values), len(values)
    below = 0.0  # the probability that fewer than ``rank`` of n values lie below the median
    rank, coverage = 1, 1 - 2 * 0.5**n
    for candidate in range(1, n // 2 + 1):
        below += math.comb(n, candidate - 1) * 0.5**n
        if 1 - 2 * below < LEVEL:
            break
        rank, coverage = candidate, 1 - 2 * below
    return Estimate(statistics.median(ordered), ordered[rank - 1], ordered[n - rank], n, max(0.0, coverage))


def exact(value: float) -> Estimate:
    """Return the estimate of a count that is the same in every run."""
    return Estimate(value, value, value, 1, 1.0)


def difference(rounds: Sequence[Round], variant: str, baseline: str, quantity: str) -> Estimate:
    """Estimate ``variant - baseline`` from its value in each round."""
    return estimate([samples[variant][quantity] - samples[baseline][quantity] for samples in rounds])


def ratio(rounds: Sequence[Round], variant: str, baseline: str, quantity: str) -> Estimate:
    """Estimate ``variant / baseline`` from its value in each round."""
    return estimate([samples[variant][quantity] / samples[baseline][quantity] for samples in rounds])


def process(command: Sequence[str | Path], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a process in an empty folder. Return its wall clock and CPU time in ms, and the JSON of its last line."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("w+") as output:
        begin = time.perf_counter()
        child = subprocess.Popen(
            [str(argument) for argument in command],
            env=dict(environment),
            cwd=_empty(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)  # Otherwise Popen would wait for the process once more.
        output.seek(0)
        text = output.read()
    if child.returncode != 0:
        raise _ended(command, child.returncode, text)
    last_line = text.strip().rpartition("\n")[2]
    answer = json.loads(last_line) if last_line.startswith("{") else {}
    return {"wall_ms": wall * 1e3, "cpu_ms": (usage.ru_utime + usage.ru_stime) * 1e3, **answer}


def uv(*arguments: str | Path) -> None:
    run([sys.executable, "-m", "uv", "--quiet", *arguments])


def run(command: Sequence[str | Path]) -> None:
    """Run a command that is not measured. Raises ``RuntimeError`` with what it said if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise _ended(command, process.returncode, process.stdout + process.stderr)


def _ended(command: Sequence[str | Path], code: int, output: str) -> RuntimeError:
    return RuntimeError(f"{' '.join(map(str, command))} ended with {code}; it said:\n{output[-4000:]}")


def _empty(folder: str) -> str:
    empty_folder = Path(folder, "cwd")
    empty_folder.mkdir()
    return str(empty_folder)


def bare_environment(**variables: str) -> dict[str, str]:
    """Return ``PATH``, ``HOME``, ``LANG`` and ``variables``. Other variables could change Python or trl_hotfix."""
    return {**{key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}, **variables}


def place(release: str, stack: str | None = None) -> Any:
    """Return a TRL release of the bench (``bench``), which is laid out first if it is not there yet."""
    from bench.releases import layout

    place_of_release = next(candidate for candidate in layout.places([release]) if stack in (None, candidate.stack))
    layout.build([place_of_release])
    return place_of_release


def release_environment(release: str, stack: str | None = None, **variables: str) -> dict[str, str]:
    """Return the environment of a process with this release. It may write compiled files, as a user's process does."""
    variables_of_release = place(release, stack).environment()
    variables_of_release.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**variables_of_release, **variables}


@contextlib.contextmanager
def for_training(release: str, **variables: str) -> Iterator[dict[str, str]]:
    """Yield the environment of a process that trains a tiny model of the proofs on a release, in a new home folder."""
    environment = release_environment(release, **variables)
    with tempfile.TemporaryDirectory() as home:
        yield {**environment, "HF_HOME": home, "TMPDIR": home}


@contextlib.contextmanager
def only(patch_id: str, mode: str) -> Iterator[None]:
    """Import TRL's trainer within this context: the mode ``patched`` applies the patch, and no other mode does.

    At the end an assertion checks whether the patch is on.
    """
    import trl_hotfix

    if mode == "patched":
        trl_hotfix.apply(only=[patch_id])
    yield
    status = trl_hotfix.status()[patch_id]
    assert (status.state.value == "applied") == (mode == "patched"), status


def fresh_folder(name: str) -> Path:
    """Return an empty folder under ``build/benchmarks``."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def installed(source: Path, name: str) -> Path:
    """Install the package of a checkout as users have it, from its wheel, into a fresh folder. Return that."""
    folder = fresh_folder(name)
    # Without the cache: uv knows a folder by its path, and another commit may have been built there.
    uv("pip", "install", "--compile-bytecode", "--no-deps", "--no-cache", "--target", folder, source)
    return folder


def ratio_of_steps(rounds: Sequence[Round], variant: str, baseline: str, quantity: str) -> Estimate:
    """Estimate ``variant / baseline`` from the median of the steps of each round.

    The steps of a round share their processes, so they are not independent.
    """
    steps = (zip(samples[variant][quantity], samples[baseline][quantity], strict=True) for samples in rounds)
    return estimate([statistics.median(value / reference for value, reference in pairs) for pairs in steps])


def as_plain_data(rounds: Sequence[Round]) -> list[dict[str, dict[str, Any]]]:
    """Return rounds as plain data, with six digits."""
    return [
        {name: {key: short(value) for key, value in sample.items()} for name, sample in samples.items()}
        for samples in rounds
    ]


def short(value: Any) -> Any:
    """Return plain data with six digits of each number that is not whole."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: short(element) for key, element in value.items()}
    return [short(element) for element in value] if isinstance(value, (list, tuple)) else value
