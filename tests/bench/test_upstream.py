"""TRL's own tests pass with the patches. ``make upstream`` runs all of them; this file runs a slice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from bench.upstream import runner
from bench.upstream.runner import Compared
from helpers import sharing

LISTED = runner.settings()["releases"]
SLICE = [release for release in LISTED if "slice" in LISTED[release]]
EVIDENCE: Mapping[str, Any] = json.loads(runner.EVIDENCE.read_text())


@pytest.fixture(scope="module")
def comparisons(request: pytest.FixtureRequest) -> Mapping[str, Compared]:
    releases = {case["release"] for case in sharing.parameters(request)}
    runner.build(sorted(releases))
    return {release: runner.run(release, LISTED[release]["slice"]) for release in sorted(releases)}


every_slice = pytest.mark.parametrize("release", sharing.heavy(SLICE))


@every_slice
def test_no_test_of_trl_fails_only_with_the_patches(comparisons: Mapping[str, Compared], release: str) -> None:
    assert comparisons[release].new_failures == [], [
        comparisons[release].outcomes[test] for test in comparisons[release].new_failures
    ]


@every_slice
def test_every_patch_is_on_when_the_tests_end(comparisons: Mapping[str, Compared], release: str) -> None:
    assert comparisons[release].not_on == []


@every_slice
def test_every_patch_is_called_by_a_test_of_trl(comparisons: Mapping[str, Compared], release: str) -> None:
    unused = set(LISTED[release].get("not called", ()))
    assert set(comparisons[release].calls) == set(runner.expected(release)) - unused


@every_slice
def test_a_test_that_pins_the_bug_fails_only_when_patched(comparisons: Mapping[str, Compared], release: str) -> None:
    outcomes = {test: comparisons[release].outcomes[test][:2] for test in comparisons[release].pinned}
    assert outcomes == dict.fromkeys(outcomes, ("passed", "failed"))


@every_slice
def test_the_tests_of_trl_pass_without_the_patches(comparisons: Mapping[str, Compared], release: str) -> None:
    """Tests that fail without the patches prove nothing: two runs of failures would agree too."""
    counts = comparisons[release].counts()["without"]
    assert counts["passed"] >= LISTED[release]["slice"]["pass"], counts


@pytest.mark.parametrize("release", EVIDENCE)
def test_the_evidence_has_no_new_failure(release: str) -> None:
    """A patch that is newer than the evidence is on in the slices."""
    answer = EVIDENCE[release]
    assert answer["new failures"] == []
    assert set(answer["patches"].values()) == {"applied proven"}
    assert answer["patches"].keys() <= set(runner.expected(release))


def test_the_docs_have_the_numbers_of_the_evidence() -> None:
    docs = (runner.CHECKOUT / "docs" / "promises.md").read_text()
    counts = [answer["counts"]["without"] for answer in EVIDENCE.values()]
    passed, tests = sum(count["passed"] for count in counts), sum(sum(count.values()) for count in counts)
    pins = sum(len(answer["pins the bug"]) for answer in EVIDENCE.values())
    ran = f"{tests} tests of {len(EVIDENCE)} releases ran"
    assert f"{ran}, {passed} passed without the patches and {passed - pins} with them" in " ".join(docs.split())


def test_a_reason_has_no_folder_of_the_machine() -> None:
    folder = runner.tests_of("0.23.0")
    assert runner.without_folder(f"no repository '{folder}/tests/data'", "0.23.0") == "no repository 'tests/data'"
    assert "/.bench/" not in runner.EVIDENCE.read_text()


def compared(without: str, patched: str, **fields: Any) -> Compared:
    return Compared("0.16.1", {"a test": (without, patched, "")}, states={}, calls={}, **fields)


@pytest.mark.parametrize("patched", ["failed", "error", "skipped", "missing"])
def test_passing_only_without_patches_is_a_new_failure(patched: str) -> None:
    assert compared("passed", patched).new_failures == ["a test"]


@pytest.mark.parametrize("outcome", ["passed", "failed", "error", "skipped"])
def test_an_unchanged_outcome_is_no_new_failure(outcome: str) -> None:
    assert compared(outcome, outcome).new_failures == []


def test_pinning_the_bug_is_no_new_failure() -> None:
    assert compared("passed", "failed", pinned={"a test": "it asks for the wrong number"}).new_failures == []


def test_a_patch_that_was_never_applied_is_named() -> None:
    states = dict.fromkeys(runner.expected("0.16.1"), ("applied", "proven"))
    states["grpo-single-eos-only"] = ("pending", "not-imported")
    assert Compared("0.16.1", {}, states, calls={}).not_on == ["grpo-single-eos-only"]
