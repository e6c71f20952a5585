"""The bench plans, shares and records the right runs, and drops nothing silently."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from packaging.requirements import Requirement
from rich.console import Console

from trl_hotfix.catalogue import evidence_file, loading

from bench import commands as module
from bench.proving import cells, proofs
from bench.proving.running import Case
from bench.releases import layout, trl_code
from bench.results import evidence, keys

PATCH = next(patch for patch in loading.load() if patch.id == "moe-aux-loss-lost-under-deepspeed")
PLACE = layout.Place("0.11.4", "tf4.44")
QUIET = Console(quiet=True)
CALL = PATCH.targets[0].name


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bench that remembers nothing yet."""
    monkeypatch.setattr(cells, "BENCH", tmp_path)
    monkeypatch.setattr(proofs, "BENCH", tmp_path)
    return tmp_path / "results"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, results: Path) -> list[layout.Place]:
    """Answer for the processes of cells, and return the places of those that were started."""
    started: list[layout.Place] = []

    def process(place: layout.Place, arguments: list[str], limit: float, *overlays: str) -> Any:
        started.append(place)
        ids = arguments[3:]
        bodies = {PATCH.targets[0].name: evidence.body(place.release, PATCH.targets[0])}
        cell = {"verdict": "proven", "why": "", "leaves": {}, "bodies": bodies, "calls": [CALL]}
        return {"cells": [{"patch": patch_id, **cell} for patch_id in ids]}

    monkeypatch.setattr(cells, "process", process)
    return started


def test_a_result_is_kept_and_run_again_only_when_fresh(results: Path, sources: None) -> None:
    case = Case(PATCH, PLACE)
    (answer,) = cells.run([case], 1, QUIET)
    assert (answer["verdict"], answer["ran"]) == ("proven", PLACE.release)
    assert any(call.endswith(PATCH.targets[0].attribute) for call in answer["calls"]), answer["calls"]
    (file,) = results.iterdir()
    file.write_text(json.dumps({**answer, "why": "kept"}))
    assert cells.run([case], 1, QUIET)[0]["why"] == "kept"
    assert cells.run([case], 1, QUIET, fresh=True)[0]["why"] == ""


def test_releases_of_equal_code_share_a_run(runs: list[layout.Place], monkeypatch: pytest.MonkeyPatch) -> None:
    places = [layout.Place(release, "tf4.44") for release in ("0.11.0", "0.11.1", "0.11.4")]
    monkeypatch.setattr(evidence, "body", lambda release, target: "c1:equal")
    monkeypatch.setattr(trl_code, "key", lambda release, calls: "old" if release == "0.11.0" else "new")
    answers = cells.run([Case(PATCH, place) for place in places], 1, QUIET)
    assert runs == [places[2], places[0]]
    assert {answer["release"]: answer["ran"] for answer in answers} == {
        "0.11.0": "0.11.0",
        "0.11.1": "0.11.4",
        "0.11.4": "0.11.4",
    }


def test_no_run_is_shared_between_stacks_between_bodies_or_where_it_failed(
    runs: list[layout.Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_code, "key", lambda release, calls: "equal")
    monkeypatch.setattr(evidence, "body", lambda release, target: "c1:equal")
    newest = layout.places([layout.releases()[-1]])
    cells.run([Case(PATCH, place) for place in newest], 1, QUIET)
    assert sorted(runs) == sorted(newest)

    runs.clear()
    monkeypatch.setattr(evidence, "body", lambda release, target: f"c1:{release}")
    places = [layout.Place(release, "tf4.44") for release in ("0.11.0", "0.11.1")]
    cells.run([Case(PATCH, place) for place in places], 1, QUIET, fresh=True)
    assert sorted(runs) == places

    monkeypatch.setattr(cells, "process", lambda *arguments: "no answer")
    monkeypatch.setattr(evidence, "body", lambda release, target: "c1:equal")
    answers = cells.run([Case(PATCH, place) for place in places], 1, QUIET, fresh=True)
    assert [(answer["ran"], answer["why"]) for answer in sorted(answers, key=evidence.place_of)] == [
        ("0.11.0", "no answer"),
        ("0.11.1", "no answer"),
    ]


def test_no_run_is_shared_where_a_release_inherits_more(
    runs: list[layout.Place], sources: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = next(patch for patch in loading.load() if patch.id == "transformers-divides-gradients-of-others-twice")
    monkeypatch.setattr(trl_code, "key", lambda release, calls: "equal")
    (kto,) = [target for target in patch.targets if target.module == "trl.experimental.kto.kto_trainer"]
    # 1.8.0 has no KTOTrainer there, and every body of the other targets is equal.
    places = [layout.Place(release, "tf5.23") for release in ("1.5.1", "1.8.0")]
    assert [evidence.body_or_base(place.release, kto) is None for place in places] == [False, True]
    cells.run([Case(patch, place) for place in places], 1, QUIET)
    assert sorted(runs) == places


def test_every_cell_on_record_is_of_a_run_on_the_same_bodies(sources: None) -> None:
    others = [
        (patch.id, str(evidence.place_of(cell)), cell["ran"])
        for patch in loading.load()
        for cell in evidence.load(patch.id)["cells"]
        if cells.bodies_of(patch, cell["ran"]) != cells.bodies_of(patch, cell["release"])
    ]
    assert others == []


def test_an_unknown_call_stands_for_its_module(sources: None) -> None:
    module_name = "trl.trainer.dpo_trainer"
    unknown = [trl_code.key(release, [f"{module_name}:<lambda>"]) for release in ("0.11.3", "0.11.4", "0.12.0")]
    modules = [trl_code.module_key(release, [module_name]) for release in ("0.11.3", "0.11.4", "0.12.0")]
    assert len(set(unknown)) == len(set(modules)) > 1
    nowhere = {trl_code.key(release, ["trl.nowhere:f"]) for release in ("0.11.3", "0.11.4")}
    assert len(nowhere) == 2


def test_a_place_that_gives_no_answer_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: Path, sources: None
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such stack >&2\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(layout.Place, "python", broken)
    (answer,) = cells.run([Case(PATCH, PLACE)], 1, QUIET)
    assert answer["verdict"] == "error"
    assert answer["why"] == "the process ended with exit code 7: no such stack"


def test_what_is_on_record_with_the_present_key_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cells.missing([PATCH], layout.places()) == []
    (case,) = cells.missing([PATCH], [layout.Place("0.0.1", "tf4.44")])
    assert case.place.release == "0.0.1"
    revised = replace(PATCH, revision=PATCH.revision + 1)
    assert [case.place for case in cells.missing([revised], layout.places())] == list(layout.places())
    monkeypatch.setattr(layout, "stack_key", lambda stack: stack)
    assert len(cells.missing([PATCH], layout.places())) == len(layout.places())


def test_every_release_is_on_its_stacks_with_the_main_one_first() -> None:
    places = layout.places()
    assert len(layout.releases()) >= 66
    assert list(dict.fromkeys(place.release for place in places)) == list(layout.releases())
    assert len(set(places)) == len(places)
    for release in layout.releases():
        first, *others = (place for place in places if place.release == release)
        assert first == layout.main_place(release)
        assert not any(place.is_main for place in others)


@pytest.mark.parametrize(("release", "stack"), [("0.17.0", "tf4.51"), ("0.22.2", "tf4.57"), ("1.16.0", "tf5.23")])
def test_the_newest_stack_of_a_release_can_be_its_main_one(release: str, stack: str) -> None:
    assert [place.stack for place in layout.places([release]) if place.is_newest] == [stack]


def test_every_stack_has_a_lock_with_the_transformers_of_its_name() -> None:
    assert {file.stem for file in (layout.HERE / "stacks").glob("*.txt")} == set(layout.stacks())
    for stack in layout.stacks():
        assert layout.versions(stack)["transformers"].startswith(f"{stack.removeprefix('tf')}.")


def test_a_stack_has_what_the_metadata_of_its_releases_ask_for(sources: None) -> None:
    for place in layout.places():
        (distribution,) = metadata.distributions(path=[str(place.overlay)], name="trl")
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                version = layout.versions(place.stack).get(requirement.name.replace("_", "-"))
                assert version is not None, (place, requirement)
                assert requirement.specifier.contains(version), (place, requirement, version)


@pytest.mark.parametrize(
    ("requires", "overlays"),
    [
        ({"deepspeed": ">=0.15.2,<0.18.4"}, ("deepspeed-0.18.3",)),
        ({"deepspeed": ">=0.19", "liger-kernel": ">=0.5"}, ("deepspeed", "liger")),
        ({"transformers": ">=4.44"}, ()),
    ],
)
def test_what_a_patch_requires_and_no_stack_has_is_put_beside_it(
    requires: dict[str, str], overlays: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, results: Path, sources: None
) -> None:
    patch, seen = replace(PATCH, requires=requires), []
    answer = {"cells": [{"patch": PATCH.id, "verdict": "proven", "why": "", "leaves": {}, "bodies": {}, "calls": []}]}
    monkeypatch.setattr(cells, "process", lambda place, arguments, limit, *folders: seen.append(folders) or answer)
    cells.run([Case(patch, PLACE)], 1, QUIET)
    assert (seen, bool(PLACE.targets_of(patch))) == ([overlays], bool(PLACE.targets_of(PATCH)))
    assert bool(PLACE.targets_beside(patch)) == (not overlays and bool(PLACE.targets_of(PATCH)))
    assert proofs.overlays_of(patch, PLACE)[: len(overlays)] == overlays
    other = replace(patch, requires={name: f"{specifiers},<99" for name, specifiers in requires.items()})
    assert keys.cell_key(patch, PLACE) != keys.cell_key(other, PLACE)


def test_a_version_that_no_stack_and_no_overlay_has_leaves_no_target() -> None:
    patch = replace(PATCH, requires={"deepspeed": "<0.1"})
    assert (PLACE.overlays_of(patch), PLACE.targets_of(patch)) == ((), ())


@pytest.mark.parametrize(("requires", "shared"), [({"transformers": ">=5"}, True), ({"transformers": ">=4"}, False)])
def test_releases_share_a_run_that_calls_nothing_beside_libraries_that_the_patch_does_not_ask_for(
    requires: dict[str, str], shared: bool, monkeypatch: pytest.MonkeyPatch, results: Path
) -> None:
    patch, started = replace(PATCH, requires=requires), []
    cell = {"patch": PATCH.id, "verdict": "absent", "why": "", "leaves": {}, "bodies": {CALL: "c1:0"}, "calls": []}
    monkeypatch.setattr(evidence, "body", lambda release, target: "c1:0")
    monkeypatch.setattr(cells, "process", lambda place, *arguments: started.append(place) or {"cells": [cell]})
    places = [layout.Place(release, "tf4.44") for release in ("0.11.3", "0.11.4")]
    answers = cells.run([Case(patch, place) for place in places], 1, QUIET)
    assert len(answers) == 2
    assert started == ([places[1]] if shared else [places[1], places[0]])


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


def test_proofs_are_planned_for_the_ends_of_each_body_the_neighbours_and_the_newest(sources: None) -> None:
    patch = replace(PATCH, trl=">=0.11.0,<0.12.0", targets=PATCH.targets[:1])
    planned = {case.place.release for case in proofs.planned([patch], layout.places())}
    assert planned == {"0.10.1", "0.11.0", "0.11.4", "0.12.0", layout.releases()[-1]}


def test_a_shard_has_its_places_and_the_shards_together_have_all() -> None:
    patches, places = loading.load()[:3], layout.places()
    parts = [module.chosen_cells(patches, places, True, module.Shard(number, 4)) for number in range(1, 5)]
    together = sorted(case.name for part in parts for case in part)
    assert together == sorted(Case(patch, place).name for patch in patches for place in places)
    assert all(0 < len(part) < len(together) for part in parts)


@pytest.mark.parametrize("text", ["", "3", "0/20", "21/20", "a/b", "1/0"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected K/N with K from 1 to N"):
        module.Shard.parse(text)


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
    red = [
        (release, {"red": {"verdict": "reproduced" if release in reproduced else "fixed"}})
        for release in layout.releases()
    ]
    stacks = {release: layout.main_place(release).stack for release in layout.releases()}
    cells = [{"release": release, "stack": stacks[release], "leaves": {"a": runs}} for release, runs in red]
    assert evidence.proposed_range(PATCH, cells) == expected


def test_a_release_without_the_libraries_of_a_patch_is_no_hole_in_its_range() -> None:
    (patch,) = (each for each in loading.load() if each.id == "transformers-divides-gradients-twice")
    cells = evidence.load(patch.id)["cells"]
    assert evidence.proposed_range(patch, cells) == ">=0.27.2"
    elsewhere = [cell for cell in cells if cell["stack"] != "tf5.2"]
    assert evidence.proposed_range(patch, elsewhere) == ""


def test_an_evidence_file_is_written_as_it_was_read(tmp_path: Path, sources: None) -> None:
    recorded = (evidence.EVIDENCE / f"{PATCH.id}.json").read_text()
    record = evidence.load(PATCH.id)
    evidence.write(PATCH, record["cells"], record["proofs"], record["parity"], tmp_path)
    alone = {**record, "curve": None, "mutants": None}
    assert (tmp_path / f"{PATCH.id}.json").read_text() == evidence.dumped(PATCH, alone)
    assert evidence.dumped(PATCH, record) == recorded


def test_two_patches_share_no_file(tmp_path: Path, sources: None) -> None:
    """So two branches that each add a patch have no conflict here."""
    patches = loading.load()[:2]
    for patch in patches:
        record = evidence.load(patch.id)
        evidence.write(patch, record["cells"], record["proofs"], record["parity"], tmp_path, record["beneath"])
    assert {path.name for path in tmp_path.iterdir()} == {f"{patch.id}.json" for patch in patches}


def test_two_parts_merge_into_what_one_run_writes(tmp_path: Path, sources: None) -> None:
    record = evidence.load(PATCH.id)
    for number in (0, 1):
        evidence.write(PATCH, record["cells"][number::2], record["proofs"][number::2], folder=tmp_path / str(number))
    for number in (1, 0):
        part = evidence.load(PATCH.id, tmp_path / str(number))
        evidence.write(PATCH, part["cells"], part["proofs"], folder=tmp_path / "merged")
    evidence.write(PATCH, record["cells"], record["proofs"], folder=tmp_path / "at once")
    merged, at_once = (evidence.load(PATCH.id, tmp_path / name) for name in ("merged", "at once"))
    assert merged == at_once


def test_a_proof_of_other_code_does_not_stay_on_record(tmp_path: Path, sources: None) -> None:
    proofs_on_record = evidence.load(PATCH.id)["proofs"]
    first, *others = proofs_on_record
    parity = [{name: proof.get(name) for name in evidence_file.PARITY} for proof in proofs_on_record]
    evidence.write(PATCH, proofs=[{**first, "key": "of other code"}, *others], parity=parity, folder=tmp_path)
    record = evidence.load(PATCH.id, tmp_path)
    assert record["proofs"] == others
    assert list(map(evidence.place_of, record["parity"])) == list(map(evidence.place_of, others))


def test_a_body_seen_with_the_bug_and_without_is_refused(sources: None) -> None:
    cells_on_record = evidence.load(PATCH.id)["cells"]
    cell = next(cell for cell in cells_on_record if cell["verdict"] == "proven")
    leaves = {leaf: {"red": {"verdict": "fixed"}} for leaf in cell["leaves"]}
    with pytest.raises(ValueError, match="seen with the bug and without"):
        evidence.bodies_of(PATCH, [*cells_on_record, {**cell, "leaves": leaves}])


def test_a_body_with_the_bug_may_do_no_harm_out_of_its_range(sources: None) -> None:
    proven = [cell for cell in evidence.load(PATCH.id)["cells"] if cell["verdict"] == "proven"]
    bodies = evidence.bodies_of(PATCH, proven)
    target, body = next(
        (name, body) for name in bodies for body, known in bodies[name].items() if known["is"] == "buggy"
    )
    cell = next(cell for cell in proven if cell["bodies"].get(target) == body)
    leaves = {leaf: {"red": {"verdict": "absent", "why": "all rows are shuffled"}} for leaf in cell["leaves"]}
    in_range = {**cell, "verdict": "absent", "leaves": leaves}
    after = {**in_range, "release": "1.16.0"}
    assert evidence.bodies_of(PATCH, [*proven, after])[target][body]["is"] == "buggy"
    with pytest.raises(ValueError, match="seen with the bug and without"):
        evidence.bodies_of(PATCH, [*proven, in_range])


def test_an_answer_that_differs_from_the_record_of_the_same_key_is_told() -> None:
    cell = evidence.load(PATCH.id)["cells"][0]
    assert module.differences([cell], "cells") == []
    (line,) = module.differences([{**cell, "verdict": "error"}], "cells")
    assert line == f"{PATCH.id} on {evidence.place_of(cell)}: on record is {cell['verdict']}, seen is error"
    assert module.differences([{**cell, "verdict": "error", "key": "another"}], "cells") == []


def test_a_run_records_its_answers_and_fails_where_one_is_no_proof(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: None
) -> None:
    cell = next(cell for cell in evidence.load(PATCH.id)["cells"] if cell["verdict"] == "proven")
    failed = {**cell, "verdict": "error", "why": "broken", "key": "new"}
    monkeypatch.setattr(cells, "run", lambda *arguments, **options: [failed])
    arguments = ["run", "--patches", PATCH.id, "--proofs", "none", "--into", str(tmp_path)]
    result = CliRunner().invoke(module.commands, arguments)
    assert result.exit_code == 1, result.output
    assert "error: broken" in result.output
    (written,) = evidence.load(PATCH.id, tmp_path)["cells"]
    assert (written["verdict"], written["key"]) == ("error", "new")


@pytest.mark.parametrize(
    "arguments", [("--releases", "0.11.9"), ("--patches", "no-such-patch"), ("--proofs", "some"), ("--shard", "9/2")]
)
def test_wrong_usage_is_exit_2_with_one_clear_line(arguments: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "bench", "run", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


def test_verify_prints_each_run_of_the_self_test(sources: None) -> None:
    command = [sys.executable, "-m", "bench", "verify", "--release", PLACE.release, PATCH.id]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert f"{PATCH.id} on {PLACE}: proven" in lines
    for name, verdict in (("red", "reproduced"), ("green", "fixed"), ("red again", "reproduced")):
        assert any(f" {name}: {verdict} measured=" in line for line in lines), (name, lines)


@pytest.mark.parametrize(("release", "patch_id"), [("0.11.9", PATCH.id), (PLACE.release, "no-such-patch")])
def test_verify_names_what_it_does_not_know(release: str, patch_id: str) -> None:
    command = [sys.executable, "-m", "bench", "verify", "--release", release, patch_id]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "unknown" in process.stderr
    assert "Traceback" not in process.stderr
