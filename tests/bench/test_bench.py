"""The bench plans and remembers the right runs, and drops nothing silently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from trl_hotfix.catalogue import loading
from trl_hotfix.matching.fingerprints import bodies

import bench as module
import evidence
import layout
from bench import Bench, to_prove

PATCH = loading.load()[0]
PLACE = layout.Place("0.11.4", "tf4.44")
QUIET = Console(quiet=True)

pytestmark = pytest.mark.usefixtures("everywhere")


def of_the_first(answers: list[Any]) -> Any:
    (answer,) = answers
    return answer


def test_results_are_remembered_until_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_answer = of_the_first(Bench(1, False, QUIET, tmp_path).cells([PATCH], [PLACE]))
    assert first_answer["verdict"] == "proven"

    def no_process(*arguments: Any) -> Any:
        pytest.fail("a process was started")

    monkeypatch.setattr(Bench, "process", no_process)
    assert of_the_first(Bench(1, False, QUIET, tmp_path).cells([PATCH], [PLACE])) == first_answer

    started: list[Any] = []
    monkeypatch.setattr(Bench, "process", lambda *arguments: started.append(arguments) or "not run")
    revised = replace(PATCH, revision=PATCH.revision + 1)
    for patches, fresh in (([revised], False), ([PATCH], True)):
        answer = of_the_first(Bench(1, fresh, QUIET, tmp_path / "other").cells(patches, [PLACE]))
        assert (answer["verdict"], answer["why"]) == ("error", "not run")
    assert len(started) == 2


def test_a_place_that_gives_no_answer_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such stack >&2\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(layout.Place, "python", broken)
    answer = of_the_first(Bench(1, True, QUIET, tmp_path).cells([PATCH], [PLACE]))
    assert answer["verdict"] == "error"
    assert answer["why"] == "the process ended with exit code 7: no such stack"


def test_every_release_is_on_a_stack_and_the_second_line_has_its_own() -> None:
    places = layout.places()
    assert {place.release for place in places} == set(layout.releases())
    assert len(layout.releases()) >= 66
    assert {place.stack for place in places if place.release == "1.16.0"} == {"tf4.57", "tf5.23"}


def test_the_code_of_every_release_is_laid_out_without_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlays: dict[str, tuple[str, ...]] = {}
    pythons: set[Path] = set()

    def build_overlay(name: str, packages: tuple[str, ...], *, python: Path, report: Any) -> None:
        overlays[name] = packages
        pythons.add(python)

    def no_stack(*arguments: Any) -> None:
        pytest.fail("a stack was built")

    monkeypatch.setattr(layout, "BENCH", tmp_path / "bench")
    monkeypatch.setattr(layout, "build_overlay", build_overlay)
    monkeypatch.setattr(layout, "_build_stack", no_stack)
    layout.build_release_overlays(PLACE.python)
    assert overlays == {release: (f"trl=={release}",) for release in layout.releases()}
    assert pythons == {PLACE.python}


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--no-write"], True),
        (["--proofs", "none"], True),
        (["--proofs", "newest", "--no-write"], False),
        (["--proofs", "none", "--no-write"], False),
    ],
)
def test_a_run_on_one_release_lays_out_the_code_that_its_plan_and_the_evidence_need(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], needed: bool
) -> None:
    steps: list[str] = []

    def step(name: str, result: Any = None) -> Any:
        return lambda *arguments: steps.append(name) or result

    monkeypatch.setattr(layout, "build", step("build"))
    monkeypatch.setattr(layout, "build_release_overlays", step("overlays"))
    monkeypatch.setattr(Bench, "cells", step("cells", []))
    monkeypatch.setattr(Bench, "proofs", step("proofs", []))
    monkeypatch.setattr(evidence, "write", step("write"))
    result = CliRunner().invoke(module.commands, ["run", "--releases", "0.11.4", "--patches", PATCH.id, *arguments])
    assert result.exit_code == 0, result.output
    assert steps[:3] == ["build", "overlays", "cells"] if needed else steps[:2] == ["build", "cells"]


def test_proofs_are_planned_for_the_ends_of_each_body_the_neighbours_and_the_newest() -> None:
    patch = replace(PATCH, trl=">=0.11.0,<0.12.0", targets=PATCH.targets[:1])
    planned = [place.release for place in to_prove(patch, layout.places(), "all") if place.stack != "tf5.23"]
    assert planned == ["0.10.1", "0.11.0", "0.11.4", "0.12.0", layout.releases()[-1]]
    newest = to_prove(patch, layout.places(), "newest")
    assert {place.release for place in newest} == {layout.releases()[-1]}


@pytest.mark.parametrize(
    ("reproduced", "expected"),
    [
        (["0.11.0", "0.11.1"], ">=0.11.0,<0.11.2"),
        (["0.11.0", "0.11.2"], ">=0.11.0,<0.11.3,!=0.11.1"),
        ([layout.releases()[-1]], f">={layout.releases()[-1]}"),
        ([], ""),
    ],
)
def test_a_range_is_proposed_from_where_the_bug_was_seen(reproduced: list[str], expected: str) -> None:
    cells = [
        {
            "patch": PATCH.id,
            "release": release,
            "leaves": {"a": {"red": {"verdict": "reproduced" if release in reproduced else "fixed"}}},
        }
        for release in layout.releases()
    ]
    assert evidence.proposed_range(PATCH, cells) == expected


def test_a_cell_is_stale_when_the_revision_or_the_body_is_another() -> None:
    cell = next(cell for cell in evidence.load()["cells"] if cell["verdict"] == "proven")
    assert not evidence.is_stale(cell, bodies())
    assert evidence.is_stale({**cell, "revision": cell["revision"] + 1}, bodies())
    other_bodies = dict.fromkeys(cell["bodies"], "c1:0000000000000000")
    assert evidence.is_stale({**cell, "bodies": other_bodies}, bodies())


def test_proven_is_what_has_no_cell_that_failed_and_none_that_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    data = evidence.load()
    cells = [cell for cell in data["cells"] if cell["patch"] == PATCH.id and cell["verdict"] == "proven"]
    failed, stale, *_ = {cell["release"]: cell for cell in cells}.values()
    before = evidence.proven(bodies())[PATCH.id]
    unchanged = [cell for cell in data["cells"] if cell not in (failed, stale)]
    new = [{**failed, "verdict": "error"}, {**stale, "revision": stale["revision"] + 1}]
    monkeypatch.setattr(evidence, "load", lambda: {**data, "cells": [*unchanged, *new]})
    remaining = [release for release in before["releases"] if release not in (failed["release"], stale["release"])]
    assert evidence.proven(bodies())[PATCH.id] == {"revision": PATCH.revision, "releases": remaining}


def test_a_body_seen_with_the_bug_and_without_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = evidence.load()
    cell = next(cell for cell in data["cells"] if cell["verdict"] == "proven")
    leaves = {leaf: {"red": {"verdict": "fixed"}} for leaf in cell["leaves"]}
    monkeypatch.setattr(evidence, "load", lambda: {**data, "cells": [*data["cells"], {**cell, "leaves": leaves}]})
    with pytest.raises(ValueError, match="seen with the bug and without"):
        evidence.fingerprints()


def test_the_picture_on_record_is_drawn_from_the_evidence_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "matrix.json"
    copy.write_text(evidence.EVIDENCE.read_text())
    drawn = {name: (evidence.EVIDENCE.parent / name).read_text() for name in ("matrix.svg", "matrix.html")}
    monkeypatch.setattr(evidence, "EVIDENCE", copy)
    monkeypatch.setattr(evidence, "FINGERPRINTS", tmp_path / "fingerprints.json")
    monkeypatch.setattr(evidence, "PROVEN", tmp_path / "proven.json")
    evidence.make()
    assert {name: (tmp_path / name).read_text() for name in drawn} == drawn
    assert json.loads((tmp_path / "fingerprints.json").read_text())["releases"] == list(layout.releases())


@pytest.mark.parametrize("arguments", [("--releases", "0.11.9"), ("--patches", "no-such-patch"), ("--proofs", "some")])
def test_wrong_usage_is_exit_2_with_one_clear_line(arguments: tuple[str, str]) -> None:
    command = [sys.executable, module.__file__, "run", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


def test_verify_prints_each_run_of_the_self_test() -> None:
    command = [sys.executable, module.__file__, "verify", "--release", PLACE.release, PATCH.id]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    head, *runs = process.stdout.splitlines()
    assert head == f"{PATCH.id} on {PLACE}: proven"
    for name, verdict in (("red", "reproduced"), ("green", "fixed"), ("red again", "reproduced")):
        assert any(f" {name}: {verdict} measured=" in line for line in runs), (name, runs)


@pytest.mark.parametrize(("release", "patch_id"), [("0.11.9", PATCH.id), (PLACE.release, "no-such-patch")])
def test_verify_names_what_it_does_not_know(release: str, patch_id: str) -> None:
    command = [sys.executable, module.__file__, "verify", "--release", release, patch_id]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "unknown" in process.stderr
    assert "Traceback" not in process.stderr
