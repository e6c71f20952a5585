"""Decisions, evidence and addresses in words."""

from __future__ import annotations

from trl_hotfix.model import Decision, Reason, State, Upstream
from trl_hotfix.reporting import sentences


def test_a_reason_is_a_sentence_with_its_evidence() -> None:
    evidence = {"installed": "0.12.0", "fixed_in": "0.12.0"}
    assert sentences.because(Reason.FIXED_UPSTREAM, evidence) == "TRL 0.12.0: fixed upstream in 0.12.0"


def test_any_other_reason_is_its_evidence_without_tracebacks() -> None:
    evidence = {"by": "unsloth", "loss": 0.123456789, "traceback": "Traceback"}
    assert sentences.because(Reason.REPLACED, evidence) == "by unsloth, loss 0.123457"


def test_a_line_shows_the_numbers_before_and_what_changed() -> None:
    runs = {"red": {"verdict": "reproduced", "tokens": 4}, "green": {"verdict": "fixed", "tokens": 4}}
    line = sentences.in_one_line(Decision(State.APPLIED, Reason.PROVEN, runs))
    assert line == "; before: verdict=reproduced tokens=4; after: verdict=fixed"
    assert sentences.in_one_line(Decision(State.FAILED, Reason.SELF_TEST_ERROR, {"traceback": "Traceback"})) == ""


def test_links_are_issues_then_pull_requests() -> None:
    trl = "https://github.com/huggingface/trl"
    assert sentences.links(Upstream(issue=1, fix=(2, 3))) == [f"{trl}/issues/1", f"{trl}/pull/2", f"{trl}/pull/3"]
    assert sentences.links(Upstream()) == []
