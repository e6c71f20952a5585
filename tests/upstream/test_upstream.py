"""TRL's own tests find nothing wrong with the patches. All of them: ``make upstream``; here, a slice of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import runner
from runner import Compared

LISTED = runner.settings()["releases"]
SLICE = [release for release in LISTED if "slice" in LISTED[release]]
EVIDENCE: Mapping[str, Any] = json.loads(runner.EVIDENCE.read_text())


@pytest.fixture(scope="session")
def found() -> Mapping[str, Compared]:
    runner.build(SLICE)
    return {release: runner.run(release, LISTED[release]["slice"]) for release in SLICE}


@pytest.mark.parametrize("release", SLICE)
def test_no_test_of_trl_fails_only_with_the_patches(found: Mapping[str, Compared], release: str) -> None:
    assert found[release].new_failures == [], [found[release].outcomes[each] for each in found[release].new_failures]


@pytest.mark.parametrize("release", SLICE)
def test_every_patch_of_the_release_is_on_when_its_tests_end(found: Mapping[str, Compared], release: str) -> None:
    assert found[release].not_on == []


@pytest.mark.parametrize("release", SLICE)
def test_every_patch_of_the_release_is_called_by_a_test_of_trl(found: Mapping[str, Compared], release: str) -> None:
    unused = set(LISTED[release].get("not called", ()))
    assert set(found[release].calls) == set(runner.expected(release)) - unused


@pytest.mark.parametrize("release", SLICE)
def test_a_test_that_is_said_to_pin_the_bug_fails_with_the_patches_only(
    found: Mapping[str, Compared], release: str
) -> None:
    its = {test: found[release].outcomes[test][:2] for test in found[release].pinned}
    assert its == dict.fromkeys(its, ("passed", "failed"))


@pytest.mark.parametrize("release", SLICE)
def test_the_tests_of_trl_pass_without_the_patches(found: Mapping[str, Compared], release: str) -> None:
    """What fails without them says nothing about them: two runs of failures would agree too."""
    counts = found[release].counts()["without"]
    assert counts["passed"] >= LISTED[release]["slice"]["pass"], counts


@pytest.mark.parametrize("release", EVIDENCE)
def test_the_evidence_has_no_new_failure_and_every_patch_on(release: str) -> None:
    its = EVIDENCE[release]
    assert its["new failures"] == []
    assert its["patches"] == dict.fromkeys(runner.expected(release), "applied proven")


def test_the_docs_have_the_numbers_of_the_evidence() -> None:
    docs = (runner.CHECKOUT / "docs" / "promises.md").read_text()
    counts = [its["counts"]["without"] for its in EVIDENCE.values()]
    passed, tests = sum(each["passed"] for each in counts), sum(sum(each.values()) for each in counts)
    pins = sum(len(its["pins the bug"]) for its in EVIDENCE.values())
    ran = f"{tests} tests of {len(EVIDENCE)} releases ran"
    assert f"{ran}, {passed} passed without the patches and {passed - pins} with them" in " ".join(docs.split())


def compared(without: str, patched: str, **its: Any) -> Compared:
    return Compared("0.16.1", {"a test": (without, patched, "")}, states={}, calls={}, **its)


@pytest.mark.parametrize("patched", ["failed", "error", "skipped", "missing"])
def test_a_test_that_passes_only_without_the_patches_is_a_new_failure(patched: str) -> None:
    assert compared("passed", patched).new_failures == ["a test"]


@pytest.mark.parametrize("outcome", ["passed", "failed", "error", "skipped"])
def test_a_test_that_comes_to_the_same_is_none(outcome: str) -> None:
    assert compared(outcome, outcome).new_failures == []


def test_a_test_that_pins_the_bug_is_none() -> None:
    assert compared("passed", "failed", pinned={"a test": "it asks for the wrong number"}).new_failures == []


def test_a_patch_that_never_went_on_is_named() -> None:
    states = dict.fromkeys(runner.expected("0.16.1"), ("applied", "proven"))
    states["grpo-loss-normalisation"] = ("pending", "not-imported")
    assert Compared("0.16.1", {}, states, calls={}).not_on == ["grpo-loss-normalisation"]
