"""The names of releases and trainers that the commands accept."""

from __future__ import annotations

import click
import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.commands import common


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.12.2", "0.12.2"), ("v0.12.2", "0.12.2"), ("1.0", "1.0.0"), ("99.0", "99.0"), ("0.12.3.dev0", "0.12.3.dev0")],
)
def test_a_release_is_spelt_as_on_record(text: str, release: str) -> None:
    assert common.release(text) == release


@pytest.mark.parametrize(
    ("text", "message"), [("newest", "is not a version"), ("0.12.7", "there is no TRL 0.12.7; did you mean")]
)
def test_an_unknown_release_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        common.release(text)


@pytest.mark.parametrize("text", ["dpo", "DPO", "DPOTrainer", "dpotrainer"])
def test_a_trainer_is_found_in_any_spelling(text: str) -> None:
    assert common.trainer(text, loading.load()) == "DPO"


def test_an_unknown_trainer_gets_a_suggestion() -> None:
    with pytest.raises(click.UsageError, match="did you mean 'GRPO'"):
        common.trainer("gpro", loading.load())


@pytest.mark.parametrize(("trl", "answer"), [(None, True), ("0.7.4", True), ("0.11.4", False), ("1.0.0rc1", False)])
def test_no_trl_or_an_old_one_is_unsupported(trl: str | None, answer: bool) -> None:
    assert common.unsupported(trl) is answer
