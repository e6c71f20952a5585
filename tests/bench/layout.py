"""Real TRL releases, cheaply: TRL wheels as overlays over a few shared stacks.

A stack is a virtual environment with torch, transformers and all the rest, but no TRL. A release is a folder with
nothing but TRL. uv hard-links both from its cache, so 66 releases take seconds and little disk.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from packaging.version import Version

from trl_hotfix.matching import gates
from trl_hotfix.model import Patch, Target

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
BENCH = CHECKOUT / ".bench"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A release on a stack."""

    release: str
    stack: str

    def __str__(self) -> str:
        return f"{self.release}@{self.stack}"

    @property
    def python(self) -> Path:
        return BENCH / "stacks" / self.stack / "bin" / "python"

    @property
    def overlay(self) -> Path:
        return BENCH / "overlay" / self.release

    def targets_of(self, patch: Patch) -> tuple[Target, ...]:
        """The targets of ``patch`` that have the bug here."""
        return gates.targets_here(patch, self.version_of)

    def version_of(self, distribution: str) -> str | None:
        """The version that is installed here."""
        return self.release if distribution == "trl" else _versions(self.stack).get(distribution)

    def environment(self, *overlays: str) -> dict[str, str]:
        """The environment of a process that sees this release, this stack, these overlays and the checkout."""
        special = settings()["special"].get(self.release, {})
        proofs = CHECKOUT / "tests" / "proofs"
        folders = [
            str(self.overlay),
            str(CHECKOUT),
            str(proofs.parent),
            str(proofs),
            *(str(BENCH / "overlay" / each) for each in overlays),
        ]
        if "overlay" in special:
            folders.append(str(BENCH / "overlay" / special["overlay"]))
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TRL_HOTFIX", "PYTHON", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_"))
        }
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        return {**kept, **quiet, **special.get("environment", {}), "PYTHONPATH": os.pathsep.join(folders)}


@functools.cache
def settings() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((HERE / "releases.yaml").read_text())
    return data


@functools.cache
def _versions(stack: str) -> dict[str, str]:
    """What a stack has, by its lock."""
    lines = (HERE / "stacks" / f"{stack}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def releases() -> tuple[str, ...]:
    """Every release, oldest first."""
    return tuple(sorted((each for listed in settings()["stacks"].values() for each in listed), key=Version))


def places(chosen: Iterable[str] | None = None) -> tuple[Place, ...]:
    """Every release on each stack that it is run on, oldest first. Raises ``ValueError`` for an unknown release."""
    wanted = set(releases() if chosen is None else chosen)
    unknown = wanted - set(releases())
    if unknown:
        raise ValueError(f"unknown release {', '.join(sorted(unknown))}; tests/bench/releases.yaml has every one")
    listed = [
        Place(release, stack)
        for stack, its in [*settings()["stacks"].items(), *settings()["second"].items()]
        for release in its
        if release in wanted
    ]
    return tuple(sorted(listed, key=lambda place: (Version(place.release), place.stack)))


def build(wanted: Iterable[Place], said: Callable[[str], None] = print) -> None:
    """Lay out what is not there yet. Who comes while somebody does, waits."""
    BENCH.mkdir(exist_ok=True)
    with FileLock(BENCH / ".lock"):
        _build(tuple(wanted), said)


def _build(wanted: tuple[Place, ...], said: Callable[[str], None]) -> None:
    for stack in dict.fromkeys(place.stack for place in wanted):
        _build_stack(stack, said)
    overlays = {place.release: (f"trl=={place.release}",) for place in wanted}
    special = {settings()["special"].get(place.release, {}).get("overlay") for place in wanted}
    special |= {"deepspeed", "scikit-learn", "trackers", "trackio"}
    overlays |= {name: tuple(settings()["overlays"][name]) for name in special - {None}}
    python = wanted[0].python
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda item: build_overlay(*item, python=python, said=said), overlays.items()):
            pass


def _build_stack(stack: str, said: Callable[[str], None]) -> None:
    folder = BENCH / "stacks" / stack
    lock = HERE / "stacks" / f"{stack}.txt"
    key = _key(lock.read_text(), *settings()["plugin"])
    if is_ready(folder, key):
        return
    said(f"stack {stack}")
    shutil.rmtree(folder, ignore_errors=True)
    _uv("venv", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")
    # --no-deps: the lock is complete, and nothing may bring another torch.
    _uv("pip", "install", "--no-deps", "--python", python, "-r", str(lock), *settings()["plugin"])
    (folder / ".ready").write_text(key)


def build_overlay(name: str, packages: tuple[str, ...], *, python: Path, said: Callable[[str], None]) -> None:
    folder = BENCH / "overlay" / name
    key = _key(*packages)
    if is_ready(folder, key):
        return
    said(f"overlay {name}")
    shutil.rmtree(folder, ignore_errors=True)
    _uv("pip", "install", "--no-deps", "--python", str(python), "--target", str(folder), *packages, DS_BUILD_OPS="0")
    (folder / ".ready").write_text(key)


def is_ready(folder: Path, key: str) -> bool:
    ready = folder / ".ready"
    return ready.is_file() and ready.read_text() == key


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _uv(*arguments: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *arguments],
        env={**os.environ, **_find_links(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"uv {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")


@functools.cache
def _find_links() -> Mapping[str, str]:
    """uv does not read pip's settings; where pip is told of a folder of wheels, torch's CPU build may be in it."""
    if "UV_FIND_LINKS" in os.environ:
        return {}
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = os.environ.get("PIP_FIND_LINKS") or done.stdout.strip()
    return {"UV_FIND_LINKS": ",".join(found.split())} if found else {}
