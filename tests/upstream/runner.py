"""TRL's own tests on the releases that they belong to, without the patches and with all of them.

    python tests/upstream/runner.py [--releases 0.16.1,0.23.0] [--no-write]

A release's tests come from its source archive on PyPI; those of 0.24.0 and later are in none, but ``--checkout`` takes
them from a clone of TRL. Each release is run twice, in fresh processes that differ in ``TRL_HOTFIX`` only, and what
each test came to is written to ``evidence/upstream.json``. A test that passes without the patches and does not with
them is a new failure: exit code 1, unless ``upstream.yaml`` says that it pins the bug.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from trl_hotfix.catalogue import loading

import layout
from layout import BENCH, CHECKOUT, Place

HERE = Path(__file__).parent
EVIDENCE = CHECKOUT / "evidence" / "upstream.json"
SETTINGS = HERE / "upstream.yaml"
FILES = "https://files.pythonhosted.org/packages"
SECONDS = 1800.0

Answer = dict[str, Any]


@functools.cache
def settings() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(SETTINGS.read_text())
    return data


@dataclass(frozen=True, slots=True)
class Compared:
    """The tests of a release, without the patches and with them."""

    release: str
    outcomes: Mapping[str, tuple[str, str, str]]
    """For each test: what it came to without, what with, and why if it did not pass."""
    states: Mapping[str, tuple[str, str]]
    """Where each patch stood at the end of the run that had them, and why."""
    calls: Mapping[str, int]
    """In how many tests the wrappers of a patch were called."""
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
        """The patches that belong on this release and were not on at the end."""
        return [patch for patch in expected(self.release) if self.states[patch][0] != "applied"]

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            run: dict(sorted(Counter(outcome[place] for outcome in self.outcomes.values()).items()))
            for place, run in enumerate(("without", "with"))
        }


def expected(release: str) -> list[str]:
    """The patches that TRL_HOTFIX=1 has to put on in this release."""
    place = place_of(release)
    return [patch.id for patch in loading.load() if patch.default and place.targets_of(patch)]


def place_of(release: str) -> Place:
    """The release on the first of its stacks."""
    return layout.places([release])[0]


def build(releases: Iterable[str], checkout: Path | None = None) -> None:
    """Lay out the releases, their tests, pytest, and what stands for the hub."""
    places = [place_of(release) for release in releases]
    layout.build(places, click.echo)
    for name, packages in settings()["overlays"].items():
        layout.build_overlay(name, tuple(packages), python=places[0].python, said=click.echo)
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
    command = [python, str(HERE / "hub.py"), str(folder), str(SETTINGS)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
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
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        its = [member for member in opened.getmembers() if member.isfile() and _path(member).parts[:1] == ("tests",)]
        for member in its:
            content = opened.extractfile(member)
            assert content is not None
            file = folder / _path(member)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read())
    # They import their neighbours relatively. Most archives leave this file out, which is empty.
    (folder / "tests" / "__init__.py").touch()
    (folder / ".ready").write_text(release)


def _path(member: tarfile.TarInfo) -> Path:
    """Without the folder ``trl-1.2.3`` that everything lies in."""
    return Path(*Path(member.name).parts[1:])


def _from_pypi(release: str) -> bytes:
    its = settings()["releases"][release]
    if "archive" not in its:
        raise click.ClickException(f"the source archive of TRL {release} has no tests; --checkout takes a clone of TRL")
    # `pip download` would run the archive's setup.py, and that of 0.11.4 does not come through.
    with urllib.request.urlopen(f"{FILES}/{its['archive']}/trl-{release}.tar.gz", timeout=60) as answer:
        archive: bytes = answer.read()
    if hashlib.sha256(archive).hexdigest() != its["sha256"]:
        raise click.ClickException(f"what PyPI gives for TRL {release} is not what upstream.yaml names")
    return archive


def _from_checkout(release: str, checkout: Path) -> bytes:
    command = ["git", "-C", str(checkout), "archive", f"--prefix=trl-{release}/", f"v{release}", "tests"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def run(release: str, chosen: Mapping[str, Any], jobs: int = 2) -> Compared:
    """Run the tests of ``chosen`` on this release, without the patches and with them."""
    with ThreadPoolExecutor(jobs) as pool:
        without, patched = pool.map(lambda on: _pytest(release, chosen, on), ("0", "1"))
    assert not without["loaded"], f"trl_hotfix was loaded in the run without it: {without['loaded']}"
    missing = ("missing", "")
    outcomes = {}
    for test in sorted({*without["outcomes"], *patched["outcomes"]}):
        before, after = (each["outcomes"].get(test, missing) for each in (without, patched))
        outcomes[test] = (before[0], after[0], after[1] if before[0] == "passed" else before[1])
    states = {patch: (state, reason) for patch, (state, reason) in patched["states"].items()}
    calls = {patch: len(tests) for patch, tests in patched["calls"].items()}
    pinned = settings()["releases"].get(release, {}).get("pins the bug", {})
    return Compared(release, outcomes, states, calls, pinned)


def _pytest(release: str, chosen: Mapping[str, Any], on: str) -> Answer:
    place = place_of(release)
    folder = tests_of(release)
    overlays = ("upstream", *settings()["releases"].get(release, {}).get("overlays", ()))
    with tempfile.TemporaryDirectory() as temporary:
        home, out = Path(temporary, "home"), Path(temporary, "out.json")
        # A copy: `Dataset.map` leaves its results beside the data, and a run must not find those of the other.
        shutil.copytree(BENCH / "upstream" / f"hub-{place.stack}", home, symlinks=True)
        environment = place.environment(*overlays)
        environment["PYTHONPATH"] += f"{os.pathsep}{HERE}"
        environment |= {"HF_HOME": str(home), "TRL_HOTFIX": on, "PYTHONHASHSEED": "0", "WANDB_DISABLED": "true"}
        for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE"):
            environment.pop(name, None)
        options = [
            "-q",
            "-p",
            "plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            f"--rootdir={folder}",
            "--tb=short",
            "--durations=25",
        ]
        if "only" in chosen:
            options += ["-k", chosen["only"]]
        files = [str(folder / "tests" / file) for file in chosen["files"]]
        command = [str(place.python), "-m", "pytest", *options, f"--upstream-out={out}", *files]
        log = BENCH / "logs" / f"upstream-{release}-{on}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as said:
            done = subprocess.run(
                command, env=environment, cwd=temporary, stdout=said, stderr=said, timeout=SECONDS, check=False
            )
        if not out.is_file():
            raise click.ClickException(
                f"TRL's tests on {release} ended with {done.returncode} and no result: see {log}"
            )
        answer: Answer = json.loads(out.read_text())
        return answer


def write(each: Compared, chosen: Mapping[str, Any]) -> None:
    """Put what was found into ``evidence/upstream.json``; other releases stay as they are."""
    before = json.loads(EVIDENCE.read_text()) if EVIDENCE.is_file() else {}
    before[each.release] = {
        "stack": place_of(each.release).stack,
        "files": chosen["files"],
        "only": chosen.get("only", ""),
        "counts": each.counts(),
        "new failures": each.new_failures,
        "pins the bug": dict(each.pinned),
        "patches": {patch: " ".join(each.states[patch]) for patch in expected(each.release)},
        "tests that call a patch": dict(each.calls),
        "tests": {
            test: " / ".join(part for part in (*dict.fromkeys((without, patched)), why) if part)
            for test, (without, patched, why) in each.outcomes.items()
        },
    }
    ordered = {release: before[release] for release in sorted(before, key=layout.Version)}
    EVIDENCE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@click.command()
@click.option(
    "--releases", help="Separated by commas; default: all that upstream.yaml lists and PyPI has the tests of."
)
@click.option("--checkout", type=click.Path(path_type=Path), help="A clone of TRL: takes the tests from its tags.")
@click.option("--slice", "sliced", is_flag=True, help="Only what `make test` runs of them.")
@click.option("--write/--no-write", "writes", default=True, help="Write evidence/upstream.json.")
def main(releases: str | None, checkout: Path | None, sliced: bool, writes: bool) -> None:
    """Run TRL's own tests without the patches and with all of them. Exit code 1 if one fails only with them."""
    listed = settings()["releases"]
    chosen = releases.split(",") if releases else [each for each in listed if not listed[each].get("checkout")]
    if unknown := sorted(set(chosen) - set(listed)):
        raise click.BadParameter(f"{', '.join(unknown)}: upstream.yaml lists {', '.join(listed)}")
    build(chosen, checkout)
    bad = False
    for release in chosen:
        wanted = listed[release]["slice"] if sliced else listed[release]
        found = run(release, wanted)
        bad |= bool(found.new_failures or found.not_on)
        if writes:
            write(found, wanted)
        click.echo(f"{release}: {found.counts()}; patches called: {dict(found.calls)}")
        for test in found.new_failures:
            click.echo(f"  NEW FAILURE {test}: {found.outcomes[test]}")
        for patch in found.not_on:
            click.echo(f"  NOT ON {patch}: {found.states[patch]}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
