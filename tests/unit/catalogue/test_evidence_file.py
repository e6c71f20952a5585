"""What is written of a patch is what is read of it, in few lines and few bytes."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_hotfix.catalogue import evidence_file

EVIDENCE = Path(__file__).parents[3] / "evidence"
FILE = EVIDENCE / "dpo-aux-loss-unpack-crash.json"
RELEASES = ["0.9.6", "0.10.1", "0.11.4", "1.0.0rc1", "1.0.0", "1.16.0"]
STACKS = ["tf4.40", "tf4.57", "tf5.2"]
TARGETS = ["trl.dpo:DPO.loss", "trl.dpo:DPO.step", "trl.kto:KTO.loss", "trl.sft:SFT.loss"]

digests = st.sampled_from(["c1:0", "c1:1", "c1:2"])
runs = st.dictionaries(
    st.sampled_from(["red", "green", "red again"]),
    st.fixed_dictionaries({"verdict": st.just("fixed"), "measured": st.none() | st.floats(allow_nan=False)}),
)
whys = st.sampled_from(["", "in range, but the self-test says absent"])
seen = {"verdict": st.sampled_from(["proven", "absent", "not-reproduced"]), "key": st.sampled_from("ab"), "why": whys}
of_cell = {
    "leaves": st.dictionaries(st.sampled_from(["trl.kto", "trl.dpo", "trl.other"]), runs),
    "bodies": st.dictionaries(st.sampled_from([*TARGETS, "trl.sft:SFT.gone"]), digests | st.none()),
}


def answers(fields: dict[str, Any], transformers: str = "") -> Any:
    """Return a strategy for an answer in each of some places, by release and stack."""
    in_front = {"transformers": st.just(transformers)} if transformers else {}
    answer = st.fixed_dictionaries({"ran": st.sampled_from(RELEASES), **in_front, **seen, **fields})
    places = st.sampled_from([(release, stack) for release in RELEASES for stack in STACKS])
    return st.dictionaries(places, answer, max_size=6).map(
        lambda by_place: [
            {"release": release, "stack": stack, **by_place[release, stack]}
            for release, stack in sorted(by_place, key=lambda place: (RELEASES.index(place[0]), place[1]))
        ]
    )


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    cells = draw(answers(of_cell))
    releases = list(dict.fromkeys(cell["release"] for cell in cells))
    verdicts = {release: [cell["verdict"] for cell in cells if cell["release"] == release] for release in releases}
    bodies: dict[str, Any] = {}
    for target in draw(st.lists(st.sampled_from(TARGETS), unique=True)):
        labels = draw(st.dictionaries(digests, st.sampled_from(["buggy", "fixed"])))
        by_body = bodies.setdefault(target, {})
        for release in releases:
            body = draw(digests | st.none())
            if body is not None:
                known = by_body.setdefault(body, {"releases": [], **({"is": labels[body]} if body in labels else {})})
                known["releases"].append(release)
    by = draw(st.lists(st.sampled_from(releases), unique=True)) if releases else []
    inherited = {"of": "transformers:Trainer.step", "by": sorted(by, key=RELEASES.index), "is": {"c1:0": "buggy"}}
    return {
        "patch": "some-patch",
        "revision": 1,
        "releases": releases,
        "proven": evidence_file.proven(verdicts),
        "bodies": bodies,
        "inherited": draw(st.sampled_from([{}, {"trl.dpo:DPO.step": inherited}])),
        "cells": cells,
        "beneath": draw(answers(of_cell, transformers="4.47.1")),
        "proofs": draw(answers({"runs": runs})),
        "parity": [],
        "curve": draw(st.none() | st.just({"patch": "some-patch", "runs": {"patched": {"losses": [0.5, None]}}})),
        "mutants": draw(st.none() | st.just({"key": "0", "survived": ["line 3: x -> y"] * 20})),
    }


@settings(deadline=None)
@given(records())
def test_what_is_written_is_what_is_read(record: dict[str, Any]) -> None:
    text = evidence_file.text(record)
    read = evidence_file.record_of(json.loads(text))
    assert read == record
    assert evidence_file.text(read) == text


def test_results_whose_digests_begin_alike_have_different_names() -> None:
    shared = {"stack": "tf4.40", "verdict": "absent", "key": "0", "leaves": {}, "bodies": {}}
    releases = [f"1.{number}" for number in range(2000)]
    record = {
        **evidence_file.read(FILE),
        "cells": [{**shared, "release": release, "ran": release, "why": release} for release in releases],
    }
    read = evidence_file.record_of(json.loads(evidence_file.text(record)))
    assert [cell["why"] for cell in read["cells"]] == releases


@pytest.fixture
def record() -> dict[str, Any]:
    return evidence_file.read(FILE)


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the lines of two files that differ, each with its sign."""
    old, new = (evidence_file.text(each).splitlines() for each in (before, after))
    return [line for line in difflib.unified_diff(old, new, n=0, lineterm="") if line[:2] in ("+ ", "- ")]


def changed(record: dict[str, Any], number: int, **values: Any) -> list[str]:
    """Return the lines that change where the cell with this number is run again."""
    cells = [*record["cells"]]
    cells[number] = {**cells[number], **values}
    return difference(record, {**record, "cells": cells})


def test_a_cell_that_runs_again_changes_one_line_for_its_key(record: dict[str, Any]) -> None:
    for number in range(0, len(record["cells"]), 10):
        removed, added = changed(record, number, key="of other code")
        stack = record["cells"][number]["stack"]
        assert removed.startswith(f'-   "{stack}": ')
        assert "of other code" in added


def test_a_cell_with_another_result_changes_the_line_of_its_release(record: dict[str, Any]) -> None:
    cells = record["cells"]
    number = next(number for number, cell in enumerate(cells) if cell["verdict"] == "proven")
    lines = changed(record, number, why="the numbers have moved")
    (removed,) = (line for line in lines if line.startswith("-"))
    assert removed.startswith(f'-   "{cells[number]["release"]}": ')
    # The result, which is new, has a line for each run.
    assert len(lines) < 15


def test_a_new_release_is_a_line_in_the_table(record: dict[str, Any]) -> None:
    newest = record["cells"][-1]
    after = {**record, "cells": [*record["cells"], {**newest, "release": "1.17.0", "ran": "1.17.0"}]}
    after["bodies"] = {
        target: {
            body: {**known, "releases": [*known["releases"], *["1.17.0"] * (newest["bodies"].get(target) == body)]}
            for body, known in by_body.items()
        }
        for target, by_body in record["bodies"].items()
    }
    (line,) = (line for line in difference(record, after) if '"1.17.0"' in line)
    assert line.startswith('+   "1.17.0": {')


def test_the_evidence_of_a_patch_is_less_than_17_kilobytes_on_average() -> None:
    # That of the GPU is of many patches.
    sizes = [path.stat().st_size for path in EVIDENCE.glob("*.json") if path.stem != "gpu"]
    assert sum(sizes) < 17_000 * len(sizes)


def test_no_line_of_the_evidence_is_too_long_to_read() -> None:
    long = {
        f"{path.name}:{number}"
        for path in evidence_file.paths(EVIDENCE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 1000
    }
    assert long == set()
