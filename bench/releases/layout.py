"""Real TRL releases, cheaply: TRL wheels as overlays over a few shared stacks.

A stack is a virtual environment with torch, transformers and the other dependencies, but no TRL. A release is a folder
with nothing but TRL. uv hard-links both from its cache, so 66 releases take seconds and little disk.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from packaging.requirements import Requirement
from packaging.version import Version

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates
from trl_hotfix.matching.versions import VersionOf, in_range
from trl_hotfix.model import Bug, Patch, Target

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
TESTS = CHECKOUT / "tests"
BENCH = CHECKOUT / ".bench"


def proof_file(patch_id: str) -> Path:
    return TESTS / "proofs" / modules.family_of(patch_id) / f"{patch_id.replace('-', '_')}.py"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A release on a stack, perhaps with another ``transformers`` in front of that of the stack."""

    release: str
    stack: str
    transformers: str = ""

    def __str__(self) -> str:
        return f"{self.release}@{self.stack}" + (f"+transformers-{self.transformers}" if self.transformers else "")

    @property
    def python(self) -> Path:
        return BENCH / "stacks" / self.stack / "bin" / "python"

    @property
    def is_main(self) -> bool:
        """Whether this is the stack on which the release is run where one stack is enough."""
        return self.stack == _stacks_by_release()[self.release][0]

    @property
    def is_newest(self) -> bool:
        """Whether no other stack of the release has a newer transformers. The main stack can be the newest."""
        return self.stack == max(_stacks_by_release()[self.release], key=_transformers)

    @property
    def overlay(self) -> Path:
        return BENCH / "overlay" / self.release

    def targets_of(self, patch: Patch) -> tuple[Target, ...]:
        """Return the targets of ``patch`` that have the bug in this place."""
        return gates.targets_here(patch, self.versions_for(patch))

    def targets_beside(self, patch: Patch, *overlays: str) -> tuple[Target, ...]:
        """Return them for a process that has just these overlays, which the runs of many patches share."""
        first = dict(first_package(overlay) for overlay in overlays)
        return gates.targets_here(patch, lambda distribution: first.get(distribution) or self.version_of(distribution))

    def version_of(self, distribution: str) -> str | None:
        """Return the version that is installed in this place."""
        if distribution == "transformers" and self.transformers:
            return self.transformers
        return self.release if distribution == "trl" else versions(self.stack).get(distribution)

    def versions_for(self, patch: Bug) -> VersionOf:
        """Return a look-up of the versions that the runs of this patch have here, in overlays too."""
        beside = {name: version for name, (_, version) in self._beside(patch).items()}
        return lambda distribution: beside.get(distribution) or self.version_of(distribution)

    def overlays_of(self, patch: Bug) -> tuple[str, ...]:
        """Return the overlays that the runs of this patch have here: what it requires and the stack lacks."""
        return tuple(overlay for overlay, _ in self._beside(patch).values())

    def _beside(self, patch: Bug) -> Mapping[str, tuple[str, str]]:
        """Return the newest overlay, with its version, for each package that the patch requires and the stack lacks."""
        beside = {}
        for distribution, specifiers in patch.requires.items():
            fitting = [
                (overlay, version)
                for overlay, version in overlays_with(distribution).items()
                if self.version_of(distribution) is None and in_range(version, specifiers)
            ]
            if fitting:
                beside[distribution] = max(fitting, key=lambda found: Version(found[1]))
        return beside

    def environment(self, *overlays: str) -> dict[str, str]:
        """Return the environment of a process that sees this release, this stack, these overlays and the checkout."""
        special = settings()["special"].get(self.release, {})
        folders = [
            str(self.overlay),
            *([str(BENCH / "overlay" / f"transformers-{self.transformers}")] if self.transformers else []),
            str(CHECKOUT),
            str(TESTS),
            *(str(BENCH / "overlay" / overlay) for overlay in overlays),
        ]
        if "overlay" in special:
            folders.append(str(BENCH / "overlay" / special["overlay"]))
        missing = [folder for folder in folders if not Path(folder).is_dir()]
        if missing:
            # Without it the process would import what the stack has, and the result would be that of another place.
            raise FileNotFoundError(
                f"{self} is not laid out: {', '.join(missing)} is missing. Call `layout.build` first."
            )
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
def stack_key(stack: str) -> str:
    """Return a key of all that a stack has."""
    return _stack_key(stack)[:16]


def _stack_key(stack: str) -> str:
    return _key(lock(stack).read_text(), *settings()["plugin"])


def lock(stack: str) -> Path:
    """Return the file with the pins of a stack."""
    return HERE / "stacks" / f"{stack}.txt"


@functools.cache
def versions(stack: str) -> dict[str, str]:
    """Return the versions that the lock of a stack pins."""
    lines = lock(stack).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@functools.cache
def overlays_with(distribution: str) -> dict[str, str]:
    """Return the overlays whose first package this is, with its version."""
    first = {overlay: first_package(overlay) for overlay in settings()["overlays"]}
    return {overlay: version for overlay, (name, version) in first.items() if name == distribution}


def first_package(overlay: str) -> tuple[str, str]:
    """Return the name and the version of what this overlay is for."""
    name, _, version = settings()["overlays"][overlay][0].partition("==")
    return name, version


@functools.cache
def _stacks_by_release() -> Mapping[str, tuple[str, ...]]:
    """Return the stacks of every release, oldest first: the main one, then the others from old to new transformers."""
    listed = {release: list(group["stacks"]) for group in settings()["groups"] for release in group["releases"]}
    for stack, releases_between in settings()["between"].items():
        for release in releases_between:
            listed[release].append(stack)
    return {
        release: (main, *sorted(others, key=_transformers))
        for release, (main, *others) in sorted(listed.items(), key=lambda item: Version(item[0]))
    }


def releases() -> tuple[str, ...]:
    """Return every release, oldest first."""
    return tuple(_stacks_by_release())


def stacks() -> tuple[str, ...]:
    """Return every stack, oldest transformers first."""
    return tuple(sorted(set(itertools.chain.from_iterable(_stacks_by_release().values())), key=_transformers))


def _transformers(stack: str) -> Version:
    return Version(versions(stack)["transformers"])


@functools.cache
def main_place(release: str) -> Place:
    """Return the release on its main stack. Raises ``ValueError`` for an unknown release."""
    return next(place for place in places([release]) if place.is_main)


def places(chosen: Iterable[str] | None = None) -> tuple[Place, ...]:
    """Return every release, oldest first, on each of its stacks: its main one, then from old to new transformers.

    Raises ``ValueError`` for an unknown release.
    """
    selected = set(releases() if chosen is None else chosen)
    unknown = selected - set(releases())
    if unknown:
        raise ValueError(f"unknown release {', '.join(sorted(unknown))}; bench/releases/releases.yaml has every one")
    return tuple(
        Place(release, stack)
        for release in releases()
        if release in selected
        for stack in _stacks_by_release()[release]
    )


def first_and_newest(patch: Patch) -> list[Place]:
    """Return the first place that has the bug, and the newest release that has it, on its main stack if it is there."""
    with_bug = [place for place in places() if place.targets_of(patch)]
    newest = next(place for place in with_bug if place.release == with_bug[-1].release)
    return list(dict.fromkeys((with_bug[0], newest)))


@functools.cache
def admits(release: str, transformers: str) -> bool:
    """Return whether TRL's own requirement allows this version of transformers, if the release is laid out."""
    found = next(iter(metadata.distributions(name="trl", path=[str(BENCH / "overlay" / release)])), None)
    requirements = map(Requirement, (found.requires if found is not None else None) or ())
    return all(one.specifier.contains(transformers) for one in requirements if one.name == "transformers")


def build(selected: Iterable[Place], report: Callable[[str], None] = print, *, beside: Iterable[str] = ()) -> None:
    """Lay out what is missing of these places, and of the overlays ``beside`` them.

    A second process waits until the first has finished.
    """
    BENCH.mkdir(exist_ok=True)
    with FileLock(BENCH / ".lock"):
        _build(tuple(selected), set(beside), report)


def build_release_overlays(python: Path, report: Callable[[str], None] = print) -> None:
    """Lay out the TRL wheels of all releases, without their stacks: to read their code, nothing else is needed."""
    BENCH.mkdir(exist_ok=True)
    with FileLock(BENCH / ".lock"):
        _build_overlays({release: (f"trl=={release}",) for release in releases()}, python, report)


def _build(selected: tuple[Place, ...], beside: set[str], report: Callable[[str], None]) -> None:
    for stack in dict.fromkeys(place.stack for place in selected):
        _build_stack(stack, report)
    overlays = {place.release: (f"trl=={place.release}",) for place in selected}
    special = {settings()["special"].get(place.release, {}).get("overlay") for place in selected}
    special |= {"coverage", "deepspeed", "images", "liger", "pytest", "scikit-learn", "trackers", "trackio"}
    special |= {overlay for place in selected for patch in loading.load() for overlay in place.overlays_of(patch)}
    overlays |= {name: tuple(settings()["overlays"][name]) for name in (special | beside) - {None}}
    beneath = {place.transformers for place in selected if place.transformers}
    overlays |= {f"transformers-{version}": (f"transformers=={version}",) for version in beneath}
    _build_overlays(overlays, selected[0].python, report)


def _build_overlays(overlays: Mapping[str, tuple[str, ...]], python: Path, report: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda item: build_overlay(*item, python=python, report=report), overlays.items()):
            pass


def _build_stack(stack: str, report: Callable[[str], None]) -> None:
    folder = BENCH / "stacks" / stack
    key = _stack_key(stack)
    if is_ready(folder, key):
        return
    report(f"stack {stack}")
    shutil.rmtree(folder, ignore_errors=True)
    uv("venv", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")
    # --no-deps: the lock is complete, and a dependency could bring another torch.
    uv("pip", "install", "--no-deps", "--python", python, "-r", str(lock(stack)), *settings()["plugin"])
    (folder / ".ready").write_text(key)


def build_overlay(name: str, packages: tuple[str, ...], *, python: Path, report: Callable[[str], None]) -> None:
    folder = BENCH / "overlay" / name
    key = _key(*packages)
    if is_ready(folder, key):
        return
    report(f"overlay {name}")
    shutil.rmtree(folder, ignore_errors=True)
    uv("pip", "install", "--no-deps", "--python", str(python), "--target", str(folder), *packages, DS_BUILD_OPS="0")
    (folder / ".ready").write_text(key)


def is_ready(folder: Path, key: str) -> bool:
    ready = folder / ".ready"
    return ready.is_file() and ready.read_text() == key


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def uv(*arguments: str, **variables: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "uv", "--quiet", *arguments],
        env={**os.environ, **_find_links(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"uv {' '.join(arguments)} ended with {process.returncode}:\n{process.stderr}")


@functools.cache
def _find_links() -> Mapping[str, str]:
    """Pass pip's folder of wheels on to uv, which does not read pip's settings: torch's CPU build may be in it."""
    if "UV_FIND_LINKS" in os.environ:
        return {}
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    folders = os.environ.get("PIP_FIND_LINKS") or process.stdout.strip()
    return {"UV_FIND_LINKS": ",".join(folders.split())} if folders else {}
