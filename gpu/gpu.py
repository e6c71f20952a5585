"""Run the tests of ``tests/gpu`` on the GPU of this machine: ``python gpu.py --help``.

In a bundle, which ``bundle.py`` makes, README.txt says what it needs; in a checkout ``make gpu`` lays everything out.

Each test is a process of its own with a time limit. It adds its result to ``evidence/gpu.json`` as soon as it ends;
``gpu.json`` of a bundle is a copy of that. So nothing is lost if the machine is taken away. What never
passed on this device is run first, in the order of the groups; what measures time is run alone, at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

IS_BUNDLE = Path(__file__).with_name("tests").is_dir()
HERE = Path(__file__).parents[0 if IS_BUNDLE else 1]
RECORD = HERE / "evidence" / "gpu.json"
TESTS = "tests/gpu/test_on_gpu.py"
FLASH_ATTN = HERE / ".bench" / "overlay" / "flash-attn"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / ".bench" / "libraries" / "every")]),
    **({"TRL_HOTFIX_GPU_PYTHON": sys.executable} if IS_BUNDLE else {}),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "HF_HUB_OFFLINE": "1",
}
CASES_OF_A_TEST = 7
"""At most. The limit of a test is that of so many cases, if it does not end by itself."""


@dataclass(frozen=True)
class Test:
    name: str
    group: str
    limit: float
    alone: bool
    passed: bool = False
    """Whether the record has it as passed on this device."""

    @property
    def needs_flash_attn(self) -> bool:
        return "flash" in self.name.partition("[")[2] or self.group == "flash-attn"


def plan() -> list[Test]:
    """Return all tests, in the order of the file, with what the record says of them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        finished = _pytest("--collect-only", "-q", "--plan", str(file))
        if not file.is_file():
            raise SystemExit(f"the tests cannot be collected:\n{finished.stdout}{finished.stderr}")
        listed = json.loads(file.read_text())
    device = _device()
    passed = {run["test"] for run in _runs() if run["device"] == device and run["outcome"] == "passed"}
    return [Test(it["test"], it["group"], it["limit"], it["alone"], it["test"] in passed) for it in listed]


def _runs() -> list[dict[str, str]]:
    runs: list[dict[str, str]] = json.loads(RECORD.read_text())["runs"] if RECORD.is_file() else []
    return runs


def _device() -> str | None:
    import torch

    return torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else None


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, TESTS]
    return subprocess.run(command, cwd=HERE, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def run(test: Test, rehearse: bool) -> str:
    """Run a test, and return how it ended, in a line."""
    options = ["--rehearse"] if rehearse else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"{TESTS}::{test.name}"]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=HERE, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=test.limit * CASES_OF_A_TEST)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"failed: no end within {test.limit * CASES_OF_A_TEST:g} s"
    finally:
        if IS_BUNDLE and RECORD.is_file():
            _copy(RECORD, HERE / "gpu.json")
    took = f"{time.monotonic() - begin:.0f} s"
    words = {0: "passed", 1: "failed"}.get(process.returncode, f"ended with {process.returncode}")
    lines = [line for line in output.splitlines() if line.startswith(("SKIPPED", "FAILED", "E  "))]
    if any(line.startswith("SKIPPED") for line in lines):
        words = "skipped"
    return f"{words} ({took})" + "".join(f"\n      {line[:300]}" for line in lines[-6:] if words != "passed")


def _copy(source: Path, target: Path) -> None:
    part = target.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}.part")
    shutil.copy(source, part)
    part.replace(target)


def build_flash_attn() -> str:
    """Build flash-attn's kernels, unless they are there, and return how that ended, in a line."""
    if (FLASH_ATTN / "flash_attn_2_cuda.so").is_file():
        return "is there"
    begin = time.monotonic()
    command = [sys.executable, "-m", "gpu.build_flash_attn", str(HERE / "flash-attn"), str(FLASH_ATTN)]
    environment = {**ENVIRONMENT, "MAX_JOBS": str(os.cpu_count() or 1)}
    finished = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode == 0:
        return f"built in {time.monotonic() - begin:.0f} s"
    shutil.rmtree(FLASH_ATTN, ignore_errors=True)
    return "cannot be built:\n" + "\n".join((finished.stdout + finished.stderr).splitlines()[-25:])


def run_all(tests: list[Test], jobs: int, end: float, rehearse: bool) -> None:
    """Run tests side by side, those that are alone after all others. Nothing starts that may not end by ``end``."""
    with ThreadPoolExecutor(jobs + 1) as pool:
        build: Future[str] | None = None
        if IS_BUNDLE and not rehearse and any(test.needs_flash_attn for test in tests):
            build = pool.submit(build_flash_attn)
        waiting = [test for test in tests if not test.alone]
        running: dict[Future[str], Test] = {}
        while waiting or running:
            for test in list(waiting):
                if len(running) >= jobs:
                    break
                if test.needs_flash_attn and build is not None and not build.done():
                    continue
                waiting.remove(test)
                if time.monotonic() + 30 > end:
                    print(f"{test.group}: {test.name}: not begun, no time is left", flush=True)
                    continue
                running[pool.submit(run, test, rehearse)] = test
            on_hand = {*running, *([build] if build is not None else [])}
            for future in wait(on_hand, return_when=FIRST_COMPLETED).done:
                if future is build:
                    print(f"flash-attn {build.result()}", flush=True)
                    build = None
                else:
                    test = running.pop(future)
                    print(f"{test.group}: {test.name}: {future.result()}", flush=True)
    for test in (test for test in tests if test.alone):
        if time.monotonic() + 60 > end:
            print(f"{test.group}: {test.name}: not begun, no time is left", flush=True)
        else:
            print(f"{test.group}: {test.name}: {run(test, rehearse)}", flush=True)


def show(tests: Iterable[Test]) -> None:
    groups: dict[str, list[Test]] = {}
    for test in tests:
        groups.setdefault(test.group, []).append(test)
    for name, members in groups.items():
        lacking = [test.name for test in members if not test.passed]
        print(f"{name}: {len(members) - len(lacking)} of {len(members)} passed on this device")
        for missing in lacking:
            print(f"    lacks {missing}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help="of tests (default: all)")
    parser.add_argument("--list", action="store_true", help="show what each group has shown, and what it lacks")
    parser.add_argument("--lacking", action="store_true", help="only what never passed on this device")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS", "6")), help="side by side (default: 6)")
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing that may not end by then")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes; records nothing")
    given = parser.parse_args()
    begin = time.monotonic()
    tests = plan()
    unknown = set(given.groups) - {test.group for test in tests}
    if unknown:
        names = ", ".join(dict.fromkeys(test.group for test in tests))
        raise SystemExit(f"no group {', '.join(sorted(unknown))}; there are: {names}")
    chosen = [test for test in tests if not given.groups or test.group in given.groups]
    chosen = [test for test in chosen if not (given.lacking and test.passed)]
    if given.list:
        show(chosen)
        return
    if _device() is None and not given.rehearse:
        raise SystemExit("torch sees no CUDA device here; --rehearse runs on a CPU")
    run_all(sorted(chosen, key=lambda test: test.passed), given.jobs, begin + 60 * given.minutes, given.rehearse)
    if not given.rehearse:
        shown = {test.name for test in chosen}
        show(test for test in plan() if test.name in shown)


if __name__ == "__main__":
    main()
