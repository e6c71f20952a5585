"""Tests that need a GPU: they are skipped where there is none, and say so. ``--rehearse`` runs them on the CPU instead.

A rehearsal has tiny sizes and float32, leaves out what has no CPU kernel, and records nothing. With a GPU the results
go to ``evidence/gpu.json``.

The releases run on the stacks of the bench, with torch for CUDA, whose libraries their locks do not name, in a folder
on top. A machine without a network has a Python of its own with torch and transformers: ``TRL_HOTFIX_GPU_PYTHON`` names
it. Then only ``.bench/overlay`` is needed, and the release is run on whatever that Python has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(CHECKOUT / "tests" / "bench")]

from trl_hotfix import __version__  # noqa: E402

import gpu_record  # noqa: E402
import layout  # noqa: E402
from running import process  # noqa: E402

SCRIPT = Path(__file__).with_name("train_on_device.py")

OVERLAYS: dict[str, tuple[str, ...]] = {
    "gpu-bitsandbytes": ("bitsandbytes==0.50.2",),
}
"""Packages that only these tests need, on top of a stack, by the name of their folder."""

OWN_PYTHON = "TRL_HOTFIX_GPU_PYTHON"


@dataclass(frozen=True, order=True)
class OwnPython(layout.Place):
    """A release on the Python that ``TRL_HOTFIX_GPU_PYTHON`` names."""

    @property
    def python(self) -> Path:
        return Path(os.environ[OWN_PYTHON])


def place_of(release: str, overlays: tuple[str, ...], device: str) -> tuple[layout.Place, tuple[str, ...]]:
    """Return where a release is run, laid out, and all folders that go on top of it."""
    if OWN_PYTHON in os.environ:
        place: layout.Place = OwnPython(release, "own")
        if not place.overlay.is_dir():
            pytest.skip(f"{place.overlay} is not here: run `make bench RELEASES={release}` where there is a network")
        return place, tuple(name for name in overlays if (layout.BENCH / "overlay" / name).is_dir())
    place = layout.main_place(release)
    layout.build([place], report=lambda _: None)
    for name in overlays:
        if name in OVERLAYS:
            layout.build_overlay(name, OVERLAYS[name], python=place.python, report=lambda _: None)
    return place, (*overlays, with_cuda(place)) if device == "cuda" else overlays


def with_cuda(place: layout.Place) -> str:
    """Lay out torch with the libraries that it needs on a GPU. It finds them only beside itself."""
    torch = f"torch=={layout.versions(place.stack)['torch'].partition('+')[0]}"
    name = f"gpu-{torch.replace('==', '-')}"
    folder = layout.BENCH / "overlay" / name
    if not layout.is_ready(folder, torch):
        layout.uv("pip", "install", "--python", str(place.python), "--target", str(folder), torch)
        (folder / ".ready").write_text(torch)
    return name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rehearse", action="store_true", help="Run the tests of tests/gpu on the CPU, with tiny sizes.")


def why_no_gpu() -> str | None:
    """Return why there is no GPU for the tests, or None if there is one."""
    try:
        import torch
    except ImportError:
        return "no GPU: torch is not installed"
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} sees no CUDA device; `make gpu` is for a machine that has one"
    return None


@dataclass
class Session:
    """What the session has run."""

    runs: list[gpu_record.Run] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


SESSION = pytest.StashKey[Session]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SESSION] = Session()
    config.addinivalue_line("markers", "patches: the ids of the patches that `on` puts on, for the record")
    config.addinivalue_line("markers", "gpu_only: has no kernel for a CPU, and is skipped in a rehearsal")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_no_gpu() if here else None
    rehearsal = config.getoption("--rehearse")
    for item in here:
        is_gpu_only = item.get_closest_marker("gpu_only") is not None
        if reason is not None and (not rehearsal or is_gpu_only):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return "cpu" if pytestconfig.getoption("--rehearse") else "cuda"


@dataclass
class Measure:
    """Runs cases of ``train_on_device.py``, and records them as results of one test."""

    request: pytest.FixtureRequest
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float | int | str | None] = field(default_factory=dict)
    place: Any = None
    patches: tuple[str, ...] = ()

    def __call__(
        self, case: str, release: str, switch: str, *, overlays: tuple[str, ...] = (), **settings: Any
    ) -> dict[str, Any]:
        """Return what the case measured in ``release``, with the patches (``on``) or without them (``off``).

        ``settings`` are given to the case. A case that cannot run there is skipped, with its reason.
        """
        self.place, folders = place_of(release, overlays, self.device)
        arguments = [f"{name}={value}" for name, value in settings.items()]
        answer = process(
            self.place, [str(SCRIPT), "{out}", case, self.device, switch, *self.patches, *arguments], 1200, *folders
        )
        assert not isinstance(answer, str), answer
        if "skip" in answer:
            pytest.skip(answer["skip"])
        self.versions |= answer.pop("versions")
        name = ", ".join([case, release, switch, *map(str, settings.values())])
        self.numbers |= {f"{name}: {key}": value for key, value in answer.items()}
        return answer


@pytest.fixture
def measure(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run a case in a release. ``measure.patches`` are the patches that ``on`` puts on."""
    marker = request.node.get_closest_marker("patches")
    measured = Measure(request, device, patches=() if marker is None else marker.args)
    yield measured
    report = request.node.stash.get(REPORT, None)
    if device != "cuda" or measured.place is None or report is None or report.skipped:
        return
    request.config.stash[SESSION].runs.append(
        gpu_record.Run(
            test=request.node.name,
            patches=measured.patches,
            release=measured.place.release,
            stack=measured.place.stack,
            outcome="passed" if report.passed else "failed",
            versions=dict(sorted(measured.versions.items())),
            numbers=measured.numbers,
        )
    )


REPORT = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[REPORT] = report
        if report.skipped:
            item.config.stash[SESSION].skipped[item.name] = str(report.longrepr[-1])
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    done = session.config.stash[SESSION]
    if done.runs:
        gpu_record.save(
            gpu_record.GpuRecord(
                trl_hotfix=__version__,
                machine=machine(),
                runs=tuple(sorted(done.runs, key=lambda run: run.test)),
                skipped=dict(sorted(done.skipped.items())),
            )
        )


def machine() -> gpu_record.Machine:
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
