"""TRL's own tests on the releases that they belong to, without the patches and with all of them.

    python -m bench.upstream.runner [--releases 0.16.1,0.23.0] [--no-write]

A release's tests come from its source archive on PyPI. The archives of 0.24.0 and later have none: ``--checkout`` takes
them from a clone of TRL. Each release is run twice, in fresh processes that differ in ``TRL_HOTFIX`` only, and the
outcome of each test is written to ``bench/upstream/outcomes.json``. A test that passes without the patches but not with
them is a new failure: exit code 1, unless ``upstream.yaml`` lists it under ``pins the bug``.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from trl_hotfix.catalogue import loading

from bench.releases import layout
from bench.releases.layout import BENCH, CHECKOUT

HERE = Path(__file__).parent
EVIDENCE = HERE / "outcomes.json"
SETTINGS = HERE / "upstream.yaml"
FILES = "https://files.pythonhosted.org/packages"
SECONDS = 7200.0

Answer = dict[str, Any]


@functools.cache
def settings() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(SETTINGS.read_text())
    return data


@dataclass(frozen=True, slots=True)
class Compared:
    """The outcomes of a release's tests, without the patches and with them."""

    release: str
    outcomes: Mapping[str, tuple[str, str, str]]
    """For each test: its outcome without the patches, its outcome with them, and the reason if it did not pass."""
    states: Mapping[str, tuple[str, str]]
    """The state of each patch at the end of the patched run, and the reason."""
    calls: Mapping[str, int]
    """The number of tests in which the wrappers of a patch were called."""
    pinned: Mapping[str, str] = field(default_factory=dict)

    @property
    def new_failures(self) -> list[str]:
        return [
            test
            for test, (without, patched, _) in self.outcomes.items()
            if without != patched and patched in ("failed", "error", "missing", "skipped") and test not in self.pinned
        ]

    @property
    def not_on(self) -> list[str]:
        """The patches that apply to this release but were not on at the end."""
        return [patch for patch in expected(self.release) if self.states[patch][0] != "applied"]

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            run: dict(sorted(Counter(outcome[position] for outcome in self.outcomes.values()).items()))
            for position, run in enumerate(("without", "with"))
        }


def expected(release: str) -> list[str]:
    """Return the patches that TRL_HOTFIX=1 has to apply to this release."""
    place = layout.main_place(release)
    return [patch.id for patch in loading.load() if patch.default and place.targets_beside(patch)]


def build(releases: Iterable[str], checkout: Path | None = None) -> None:
    """Lay out the releases, their tests, pytest, and the replacement of the hub."""
    places = [layout.main_place(release) for release in releases]
    layout.build(places, click.echo)
    for name, packages in settings()["overlays"].items():
        layout.build_overlay(name, tuple(packages), python=places[0].python, report=click.echo)
    for stack in dict.fromkeys(place.stack for place in places):
        _build_hub(stack)
    for place in places:
        _build_tests(place.release, checkout)


def _build_hub(stack: str) -> None:
    folder = BENCH / "upstream" / f"hub-{stack}"
    key = _key((HERE / "hub.py").read_text(), yaml.safe_dump(settings()["hub"]))
    if layout.is_ready(folder, key):
        return
    click.echo(f"hub of {stack}")
    python = str(BENCH / "stacks" / stack / "bin" / "python")
    shutil.rmtree(folder, ignore_errors=True)
    command = [python, "-m", "bench.upstream.hub", str(folder), str(SETTINGS)]
    subprocess.run(command, check=True, capture_output=True, cwd=CHECKOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    (folder / ".ready").write_text(key)


def tests_of(release: str) -> Path:
    return BENCH / "upstream" / "tests" / release


def _build_tests(release: str, checkout: Path | None) -> None:
    folder = tests_of(release)
    if layout.is_ready(folder, release):
        return
    click.echo(f"tests of {release}")
    shutil.rmtree(folder, ignore_errors=True)
    archive = _from_checkout(release, checkout) if checkout is not None else _from_pypi(release)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar.getmembers() if member.isfile() and _path(member).parts[:1] == ("tests",)]
        for member in members:
            content = tar.extractfile(member)
            assert content is not None
            file = folder / _path(member)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read())
    # The tests import their neighbours relatively. Most archives leave out this file, which is empty.
    (folder / "tests" / "__init__.py").touch()
    (folder / ".ready").write_text(release)


def _path(member: tarfile.TarInfo) -> Path:
    """Return the path without its first folder, ``trl-1.2.3``."""
    return Path(*Path(member.name).parts[1:])


def _from_pypi(release: str) -> bytes:
    listed = settings()["releases"][release]
    if "archive" not in listed:
        raise click.ClickException(f"the source archive of TRL {release} has no tests; --checkout takes a clone of TRL")
    # `pip download` would run the archive's setup.py, and that of 0.11.4 fails.
    with urllib.request.urlopen(f"{FILES}/{listed['archive']}/trl-{release}.tar.gz", timeout=60) as answer:
        archive: bytes = answer.read()
    if hashlib.sha256(archive).hexdigest() != listed["sha256"]:
        raise click.ClickException(f"what PyPI gives for TRL {release} is not what upstream.yaml names")
    return archive


def _from_checkout(release: str, checkout: Path) -> bytes:
    tag = settings()["releases"][release].get("tag", f"v{release}")
    command = ["git", "-C", str(checkout), "archive", f"--prefix=trl-{release}/", tag, "tests"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def run(release: str, selection: Mapping[str, Any], jobs: int = 2) -> Compared:
    """Run the tests of ``selection`` on this release, without the patches and with them."""
    with ThreadPoolExecutor(jobs) as pool:
        without, patched = pool.map(lambda hotfix: _pytest(release, selection, hotfix), ("0", "1"))
    assert not without["loaded"], f"trl_hotfix was loaded in the run without it: {without['loaded']}"
    missing = ("missing", "")
    outcomes = {}
    for test in sorted({*without["outcomes"], *patched["outcomes"]}):
        before, after = (answer["outcomes"].get(test, missing) for answer in (without, patched))
        reason = after[1] if before[0] == "passed" else before[1]
        outcomes[test] = (before[0], after[0], without_folder(reason, release))
    states = {patch: (state, reason) for patch, (state, reason) in patched["states"].items()}
    calls = {patch: len(tests) for patch, tests in patched["calls"].items()}
    pinned = settings()["releases"].get(release, {}).get("pins the bug", {})
    return Compared(release, outcomes, states, calls, pinned)


def without_folder(reason: str, release: str) -> str:
    """Return a reason without the folder of the tests, which is another one on each machine."""
    return reason.replace(f"{tests_of(release)}/", "")


def _pytest(release: str, selection: Mapping[str, Any], hotfix: str) -> Answer:
    place = layout.main_place(release)
    folder = tests_of(release)
    overlays = ("upstream", *settings()["releases"].get(release, {}).get("overlays", ()))
    with tempfile.TemporaryDirectory() as temporary:
        home, out = Path(temporary, "home"), Path(temporary, "out.json")
        # A copy, since `Dataset.map` writes its results beside the data, and a run must not find those of the other.
        shutil.copytree(BENCH / "upstream" / f"hub-{place.stack}", home, symlinks=True)
        environment = place.environment(*overlays)
        environment |= {"HF_HOME": str(home), "TRL_HOTFIX": hotfix, "PYTHONHASHSEED": "0", "WANDB_DISABLED": "true"}
        for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE"):
            environment.pop(name, None)
        options = [
            "-q",
            "-p",
            "bench.upstream.plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            f"--rootdir={folder}",
            "--tb=short",
            "--durations=25",
        ]
        if "only" in selection:
            options += ["-k", selection["only"]]
        options += [f"--upstream-gone={name}" for name in selection.get("gone", ())]
        files = [str(folder / "tests" / file) for file in selection["files"]]
        command = [str(place.python), "-m", "pytest", *options, f"--upstream-out={out}", *files]
        log = BENCH / "logs" / f"upstream-{release}-{hotfix}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as log_file:
            process = subprocess.run(
                command, env=environment, cwd=temporary, stdout=log_file, stderr=log_file, timeout=SECONDS, check=False
            )
        if not out.is_file():
            raise click.ClickException(
                f"TRL's tests on {release} ended with {process.returncode} and no result: see {log}"
            )
        answer: Answer = json.loads(out.read_text())
        return answer


def write(comparison: Compared, selection: Mapping[str, Any]) -> None:
    """Write the outcomes to ``bench/upstream/outcomes.json``; other releases stay as they are."""
    evidence = json.loads(EVIDENCE.read_text()) if EVIDENCE.is_file() else {}
    evidence[comparison.release] = {
        "stack": layout.main_place(comparison.release).stack,
        "files": selection["files"],
        "only": selection.get("only", ""),
        "counts": comparison.counts(),
        "new failures": comparison.new_failures,
        "pins the bug": dict(comparison.pinned),
        "patches": {patch: " ".join(comparison.states[patch]) for patch in expected(comparison.release)},
        "tests that call a patch": dict(comparison.calls),
        "tests": {
            test: " / ".join(part for part in (*dict.fromkeys((without, patched)), reason) if part)
            for test, (without, patched, reason) in comparison.outcomes.items()
        },
    }
    by_release = {release: evidence[release] for release in sorted(evidence, key=layout.Version)}
    EVIDENCE.write_text(json.dumps(by_release, indent=1) + "\n", encoding="utf-8")


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@click.command()
@click.option(
    "--releases", help="Separated by commas; default: all that upstream.yaml lists and PyPI has the tests of."
)
@click.option("--checkout", type=click.Path(path_type=Path), help="A clone of TRL: takes the tests from its tags.")
@click.option("--slice", "sliced", is_flag=True, help="Only what `make test` runs of them.")
@click.option("--write/--no-write", "writes", default=True, help="Write bench/upstream/outcomes.json.")
def main(releases: str | None, checkout: Path | None, sliced: bool, writes: bool) -> None:
    """Run TRL's own tests without the patches and with all of them. Exit code 1 if one fails only with them."""
    listed = settings()["releases"]
    chosen = releases.split(",") if releases else [release for release in listed if not listed[release].get("checkout")]
    if unknown := sorted(set(chosen) - set(listed)):
        raise click.BadParameter(f"{', '.join(unknown)}: upstream.yaml lists {', '.join(listed)}")
    build(chosen, checkout)
    bad = False
    for release in chosen:
        selection = listed[release]["slice"] if sliced else listed[release]
        comparison = run(release, selection)
        bad |= bool(comparison.new_failures or comparison.not_on)
        if writes:
            write(comparison, selection)
        click.echo(f"{release}: {comparison.counts()}; patches called: {dict(comparison.calls)}")
        for test in comparison.new_failures:
            click.echo(f"  NEW FAILURE {test}: {comparison.outcomes[test]}")
        for patch in comparison.not_on:
            click.echo(f"  NOT ON {patch}: {comparison.states[patch]}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
