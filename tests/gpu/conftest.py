"""Tests that need a GPU: they are skipped where there is none, and say so. ``--rehearse`` runs them on the CPU instead.

A rehearsal has tiny sizes and float32, leaves out what has no CPU kernel, and records nothing. With a GPU each test
adds its result to ``evidence/gpu.json`` as soon as it ends. ``gpu/`` makes the bundle for a machine without a network,
and runs these tests there.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.proving.running import process
from bench.results import gpu_record
from gpu import places

CHECKOUT = Path(__file__).parents[2]

LIMIT = 240
"""The seconds of a case, unless its test has ``limit``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="Run the tests of tests/gpu on the CPU, with tiny sizes.")
    parser.addoption("--plan", type=Path, help="Write the groups of the tests of tests/gpu to this file.")


def why_no_gpu() -> str | None:
    """Return why there is no GPU for the tests, or None if there is one."""
    try:
        import torch
    except ImportError:
        return "no GPU: torch is not installed"
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} sees no CUDA device; `make gpu` is for a machine that has one"
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "patches: the ids of the patches that `on` puts on, for the record")
    config.addinivalue_line("markers", "gpu_only: has no kernel for a CPU, and is skipped in a rehearsal")
    config.addinivalue_line("markers", "group: what is run together, in the order of the file")
    config.addinivalue_line("markers", "limit: the seconds of one case")
    config.addinivalue_line("markers", "alone: measures time, and shares the device with nothing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    plan = config.getoption("--plan")
    if plan is not None:
        plan.write_text(json.dumps([_planned(item) for item in here]))
        return
    rehearsal = config.getoption("--rehearse")
    reason = why_no_gpu() if here else None
    for item in here:
        is_gpu_only = item.get_closest_marker("gpu_only") is not None
        if reason is not None and (not rehearsal or is_gpu_only):
            item.add_marker(pytest.mark.skip(reason=reason))


def _planned(item: pytest.Item) -> dict[str, Any]:
    group, limit = item.get_closest_marker("group"), item.get_closest_marker("limit")
    assert group is not None, f"{item.name} is in no group"
    return {
        "test": item.name,
        "group": group.args[0],
        "alone": item.get_closest_marker("alone") is not None,
        "limit": LIMIT if limit is None else limit.args[0],
    }


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return "cpu" if pytestconfig.getoption("--rehearse") else "cuda"


@dataclass
class Measure:
    """Runs cases of ``train_on_device.py``, and records them as results of one test."""

    device: str
    limit: float
    versions: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float | int | str | None] = field(default_factory=dict)
    place: Any = None
    patches: tuple[str, ...] = ()

    def __call__(
        self,
        case: str,
        release: str,
        switch: str,
        *,
        stack: str | None = None,
        overlays: tuple[str, ...] = (),
        **settings: Any,
    ) -> dict[str, Any]:
        """Return what the case measured in ``release``, with the patches of the test (``on``), all (``all``) or none.

        ``settings`` are given to the case. A case that cannot run there is skipped, with its reason.
        """
        self.place, folders = places.place_of(release, stack, overlays, self.device)
        arguments = [f"{name}={value}" for name, value in settings.items()]
        name = ", ".join([case, release, switch, *map(str, settings.values())])
        answer = process(
            self.place,
            ["-m", "gpu.train_on_device", "{out}", case, self.device, switch, *self.patches, *arguments],
            self.limit,
            *folders,
            lines=25,
        )
        assert not isinstance(answer, str), f"{name}: {answer}"
        if "skip" in answer:
            pytest.skip(answer["skip"])
        self.versions |= answer.pop("versions")
        self.numbers |= {f"{name}: {key}": value for key, value in answer.items()}
        return answer


@pytest.fixture
def measure(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run a case in a release. ``measure.patches`` are the patches that ``on`` puts on."""
    patches, limit = (request.node.get_closest_marker(name) for name in ("patches", "limit"))
    measured = Measure(
        device, LIMIT if limit is None else limit.args[0], patches=() if patches is None else patches.args
    )
    begin = time.monotonic()
    yield measured
    report = request.node.stash.get(REPORT, None)
    if device == "cuda" and measured.place is not None and report is not None:
        _record(request.node.name, measured, report, time.monotonic() - begin)


def _record(name: str, measured: Measure, report: pytest.TestReport, seconds: float) -> None:
    why = {"passed": "", "failed": report.longreprtext[-3000:], "skipped": ""}[report.outcome]
    if report.skipped and isinstance(report.longrepr, tuple):
        why = str(report.longrepr[-1])
    machine = machine_here()
    run = gpu_record.Run(
        test=name,
        patches=measured.patches,
        release=measured.place.release,
        stack=measured.place.stack,
        device=machine.device,
        date=datetime.date.today().isoformat(),
        code=code(),
        outcome=report.outcome,
        seconds=round(seconds, 1),
        versions=dict(sorted(measured.versions.items())),
        numbers=measured.numbers,
        why=why,
    )
    gpu_record.add([machine], [run])


REPORT = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[REPORT] = report
    return report


def code() -> str:
    """Return the commit that is run: of the checkout, or the one that the bundle was made of."""
    bundled = CHECKOUT / "COMMIT"
    if bundled.is_file():
        return bundled.read_text().strip()
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return (
        subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    )


def machine_here() -> gpu_record.Machine:
    """Return the first GPU, as torch and the driver name it."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return gpu_record.Machine(
        device=properties.name,
        memory=properties.total_memory // 2**20,
        capability=f"{properties.major}.{properties.minor}",
        driver=driver,
        cuda=str(torch.version.cuda),
    )
