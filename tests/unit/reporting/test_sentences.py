"""Decisions, evidence and addresses in words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from trl_hotfix.model import Decision, Reason, State, Upstream
from trl_hotfix.reporting import sentences

from helpers.patch_examples import PATCH


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


@pytest.mark.parametrize(
    ("fixed_in", "requires", "words"),
    [
        (None, {}, None),
        (None, {"transformers": ">=5.0"}, None),
        ("1.9.0", {"transformers": ">=4.46,<5.3", "peft": ">=0.8"}, "TRL 1.9.0, or transformers 5.3"),
        (None, {"deepspeed": "==0.18.3"}, "deepspeed >0.18.3"),
    ],
)
def test_a_bug_is_gone_where_the_range_of_a_layer_ends(
    fixed_in: str | None, requires: dict[str, str], words: str | None
) -> None:
    bug = replace(PATCH, upstream=Upstream(fixed_in=fixed_in), requires=requires)
    assert sentences.fixed_of(bug) == words
    assert (
        sentences.no_repair(words)
        == f"known, no repair here; {f'fixed in {words}' if words else 'no release fixes it'}"
    )
