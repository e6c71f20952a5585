"""The eleven lines about a patch say what is on record, and what is wrong is a failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trl_hotfix.catalogue import loading

from bench.proving import check
from bench.results import evidence

PATCH = next(patch for patch in loading.load() if patch.id == "grpo-loss-normalisation")
PASSED = {name: Counter(passed=2) for name in ("variants", "together", "surroundings", "pickles")}


@pytest.fixture
def record() -> Any:
    return evidence.load(PATCH.id)


def test_there_are_eleven_lines_with_range_numbers_and_what_was_not_run(record: Any) -> None:
    lines = list(check.lines(PATCH, record, PASSED))
    assert len(lines) == 11
    text = "\n".join(lines)
    assert PATCH.title in lines[0]
    assert f"{PATCH.trl}: proposed by the self-tests" in lines[1]
    proven = [cell for cell in record["cells"] if cell["verdict"] == "proven"]
    assert f"{len(record['cells'])} places by" in lines[2]
    assert f"{len(proven)} proven" in lines[2]
    red = next(iter(proven[-1]["leaves"].values()))["red"]
    assert f"red measured {red['measured']:.6g}" in text
    assert "together 2 passed" in text
    assert lines[-2].startswith("mutants     ")
    assert lines[-1].startswith("not run     a GPU")
    assert list(check.failures(PATCH, record, PASSED)) == []


def test_each_thing_that_is_wrong_is_a_failure(record: Any) -> None:
    cell, *others = record["cells"]
    wrong = {
        **record,
        "cells": [{**cell, "verdict": "unrepaired", "why": "still there"}, *others],
        "parity": [{**record["parity"][0], "loss_difference": 1e-3}],
    }
    outcomes = {**PASSED, "pickles": Counter(passed=1, failure=1), "variants": Counter()}
    failures = list(check.failures(PATCH, wrong, outcomes))
    place, compared = evidence.place_of(cell), evidence.place_of(record["parity"][0])
    assert failures == [
        f"unrepaired on {place}: still there",
        f"{compared} differs from {record['parity'][0]['fixed_release']} by more than 1e-6",
        "tests/bench/test_pickles.py: 1 failure, 1 passed",
        "tests/bench/test_variants.py: no test ran",
    ]


def test_a_range_that_the_self_tests_do_not_propose_is_a_failure(record: Any) -> None:
    newest = max(cell["release"] for cell in record["cells"] if cell["verdict"] == "proven")
    cells = [cell for cell in record["cells"] if cell["release"] != newest]
    (failure,) = check.failures(PATCH, {**record, "cells": cells}, PASSED)
    assert failure == f"trl: expected '{evidence.proposed_range(PATCH, cells)}', found '{PATCH.trl}'"


def test_the_counts_of_mutants_are_in_the_lines(record: Any) -> None:
    counts = {"total": 40, "killed": 39, "equivalent": {"a mutant": "its reason"}}
    lines = list(check.lines(PATCH, {**record, "mutants": counts}, PASSED))
    assert lines[-2] == "mutants     40: 39 killed; 1 equivalent"
    lines = list(check.lines(PATCH, {**record, "mutants": None}, PASSED))
    assert lines[-2] == "mutants     not counted"


def test_nothing_proven_has_no_numbers(record: Any) -> None:
    unproven = {**record, "cells": [], "proofs": [], "parity": []}
    text = "\n".join(check.lines(PATCH, unproven, {}))
    assert text.count("none: nothing is proven") == 2
    assert "no run on record" in text
