"""Measuring side by side: variants take turns in random order, and what counts is their difference within a round.

A machine is never idle and its clock speed never constant. What is slow for a while is slow for all variants of a
round, so the ratio or the difference within the round keeps little of it.
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
from typing import IO, Any

CHECKOUT = Path(__file__).resolve().parents[1]
WORK = CHECKOUT / "build" / "benchmarks"
LEVEL = 0.95

Sample = Mapping[str, Any]
"""What one run of one variant showed: quantities by name."""

Round = Mapping[str, Sample]
"""One sample of each variant, taken one right after the other."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of ``n`` values and an interval for it, which has it with the probability ``coverage``."""

    median: float
    low: float
    high: float
    n: int
    coverage: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure. ``goal`` is what it should not exceed, where there is a goal."""

    what: str
    estimate: Estimate
    unit: str = ""
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """``met`` or ``not met`` if all of the interval is, else ``undecided``; empty without a goal."""
        if self.goal is None:
            return ""
        if self.estimate.coverage < LEVEL:
            return "undecided"
        if self.estimate.high <= self.goal:
            return "met"
        return "not met" if self.estimate.low > self.goal else "undecided"


@dataclass(slots=True)
class Result:
    """What a benchmark found, the samples that it comes from, and what was run."""

    findings: list[Finding] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def rounds(
    variants: Mapping[str, Callable[[], Sample]], repetitions: int, *, seed: int = 0, warm_up: bool = True
) -> list[Round]:
    """``repetitions`` rounds; each has every variant once, in an order of its own. The first round warms up caches."""
    order = random.Random(seed)
    done: list[Round] = []
    for _ in range(repetitions + warm_up):
        names = list(variants)
        order.shuffle(names)
        done.append({name: variants[name]() for name in names})
    return done[warm_up:]


def estimate(values: Sequence[float]) -> Estimate:
    """The median, and the narrowest pair of order statistics that has it with 95 %; the ends if there are too few.

    It asks nothing of how the values are distributed but that the rounds do not depend on one another.
    """
    if not values:
        raise ValueError("an estimate needs at least one value, and there is none")
    ordered, n = sorted(values), len(values)
    below = 0.0  # the probability that fewer than ``rank`` of n values lie below the median
    rank, coverage = 1, 1 - 2 * 0.5**n
    for tried in range(1, n // 2 + 1):
        below += math.comb(n, tried - 1) * 0.5**n
        if 1 - 2 * below < LEVEL:
            break
        rank, coverage = tried, 1 - 2 * below
    return Estimate(statistics.median(ordered), ordered[rank - 1], ordered[n - rank], n, max(0.0, coverage))


def exact(value: float) -> Estimate:
    """A count, which every run gives anew."""
    return Estimate(value, value, value, 1, 1.0)


def difference(done: Sequence[Round], one: str, other: str, quantity: str) -> Estimate:
    """``one - other``, round by round."""
    return estimate([each[one][quantity] - each[other][quantity] for each in done])


def ratio(done: Sequence[Round], one: str, other: str, quantity: str) -> Estimate:
    """``one / other``, round by round."""
    return estimate([each[one][quantity] / each[other][quantity] for each in done])


def process(command: Sequence[str | Path], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a process in an empty folder: wall clock and CPU time in ms, and what its last line says in JSON."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "said").open("w+") as said:
        begin = time.perf_counter()
        child = subprocess.Popen(
            [str(each) for each in command],
            env=dict(environment),
            cwd=_empty(folder),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)  # else Popen would wait for it once more
        said.seek(0)
        text = said.read()
    if child.returncode != 0:
        raise _ended(command, child.returncode, text)
    last = text.strip().rpartition("\n")[2]
    told = json.loads(last) if last.startswith("{") else {}
    return {"wall_ms": wall * 1e3, "cpu_ms": (used.ru_utime + used.ru_stime) * 1e3, **told}


def _ended(command: Sequence[str | Path], code: int, said: str) -> RuntimeError:
    return RuntimeError(f"{' '.join(map(str, command))} ended with {code}; it said:\n{said[-4000:]}")


def _empty(folder: str) -> str:
    made = Path(folder, "cwd")
    made.mkdir()
    return str(made)


def bare_environment(**variables: str) -> dict[str, str]:
    """What every process needs, and these: nothing that moves Python or names trl_hotfix."""
    return {**{key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}, **variables}


def place(release: str, stack: str | None = None) -> Any:
    """A TRL release of the bench (``tests/bench``), laid out if it is not yet."""
    sys.path.insert(0, str(CHECKOUT / "tests" / "bench"))
    import layout

    found = next(each for each in layout.places([release]) if stack in (None, each.stack))
    layout.build([found])
    return found


def release_environment(release: str, stack: str | None = None, **variables: str) -> dict[str, str]:
    """The environment of a process that sees this release; it may write compiled files, as anybody's does."""
    made = place(release, stack).environment()
    made.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**made, **variables}


@contextlib.contextmanager
def for_training(release: str, **variables: str) -> Iterator[dict[str, str]]:
    """The environment of a process that trains a tiny model of the proofs on a release, in a home of its own."""
    environment = release_environment(release, **variables)
    with tempfile.TemporaryDirectory() as home:
        yield {**environment, "HF_HOME": home, "TMPDIR": home}


@dataclass(frozen=True, slots=True)
class Told:
    """A process that does one thing each time that it is told to, and answers with a line of JSON."""

    words: Sequence[str]
    child: subprocess.Popen[str]
    said: IO[str]

    def answer(self) -> dict[str, Any]:
        """What it answers next. Raises ``RuntimeError`` if it has ended."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            code = self.child.wait()
            self.said.seek(0)
            raise _ended(self.words, code, self.said.read())
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self) -> dict[str, Any]:
        """Let it do one thing."""
        assert self.child.stdin is not None
        # That it has ended is said by `answer`, with what it said.
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write("go\n")
            self.child.stdin.flush()
        return self.answer()


@contextlib.contextmanager
def told(command: Sequence[str | Path], environment: Mapping[str, str]) -> Iterator[Told]:
    """Such a process, as long as it is wanted. Its answers are on the standard output, and nothing else is."""
    words, pipe = [str(each) for each in command], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(words, env=dict(environment), stdin=pipe, stdout=pipe, stderr=said, text=True) as child,
    ):
        try:
            yield Told(words, child, said)
        finally:
            child.kill()


@contextlib.contextmanager
def only(patch_id: str, mode: str) -> Iterator[None]:
    """TRL's trainer is imported inside: in the mode ``patched`` with this patch, which must be on then."""
    import trl_hotfix

    if mode == "patched":
        trl_hotfix.apply(only=[patch_id], strict=True)
    yield
    found = trl_hotfix.status()[patch_id]
    assert (found.state.value == "applied") == (mode == "patched"), found


def fresh_folder(name: str) -> Path:
    """An empty folder under ``build/benchmarks``."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def ratio_of_steps(done: Sequence[Round], one: str, other: str, quantity: str) -> Estimate:
    """``one / other``, step by step; of each round, whose steps share their processes, the median."""
    pairs = (zip(each[one][quantity], each[other][quantity], strict=True) for each in done)
    return estimate([statistics.median(its / others for its, others in each) for each in pairs])


def spread(done: Sequence[Round]) -> list[dict[str, dict[str, Any]]]:
    """Rounds as plain data, with as many digits as they are good for."""
    return [
        {name: {key: _short(value) for key, value in sample.items()} for name, sample in each.items()} for each in done
    ]


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, (list, tuple)) else value
