"""Whatever the variables hold, ``apply()`` has done what they say, or raises one clear error and has done nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix import settings
from trl_hotfix.log import _FallbackHandler
from trl_hotfix.model import Option, Outcome, State, Verdict
from trl_hotfix.patching import engine

VARIABLES = ("TRL_HOTFIX", *(f"TRL_HOTFIX_{name}" for name in ("ONLY", "SKIP", "OPTIONS", "UNKNOWN_BODY", "PACKS")))
PATCH, OTHER = "made-up", "other-one"

# What an environment can hold: no NUL, and bytes that are not UTF-8 as lone surrogates.
any_text = st.binary(max_size=40).map(lambda raw: os.fsdecode(raw.replace(b"\0", b""))) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30
)
WORDS = "over all none strict try os os.system ../x !!python/name:os http://x/y.json @http://x/y.json @/dev/stdin"
pieces = st.sampled_from([PATCH, OTHER, *WORDS.split(), *".=, @/\n01", "\x1b[31m"])
values = any_text | st.lists(pieces, max_size=6).map("".join)
environments = st.dictionaries(st.sampled_from(VARIABLES), values, max_size=4)


def reproduced_until_patched(module: ModuleType, **_: Any) -> Outcome:
    with contextlib.suppress(AttributeError):
        if object.__new__(module.DPOTrainer).dpo_loss(1, 2, 3, 4) == "patched":
            return Outcome(Verdict.FIXED)
    return Outcome(Verdict.REPRODUCED)


def patched(wrapped: Any, instance: Any, args: Any, kwargs: Any, **_: Any) -> Any:
    return "patched"


@pytest.fixture
def two_patches(declare: Any) -> None:
    declare(reproduced_until_patched, patched, options={"over": Option({"all": "", "none": ""}, "all")})
    declare(reproduced_until_patched, patched, id=OTHER, default=False)


def process_state() -> Any:
    """What must be as it was after an error: TRL, the import system, and what the engine says and remembers."""
    current = engine.ENGINE
    return dict(vars(DPOTrainer)), list(sys.meta_path), str(current.status()), current._configuration


@pytest.mark.parametrize("on_before", [True, False])
@hypothesis_settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(environment={"TRL_HOTFIX_ONLY": "x" * 100_000})
@example(environment={"TRL_HOTFIX_ONLY": ",".join(f"made-u-{number}" for number in range(10_000))})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.over=" + "x" * 100_000})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.over=\x1b[31m\n"})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.\x1b[31m\n=all"})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.over=none", "TRL_HOTFIX_SKIP": PATCH})
@example(environment={"TRL_HOTFIX": "strict", "TRL_HOTFIX_ONLY": PATCH, "TRL_HOTFIX_UNKNOWN_BODY": "try"})
@example(environment={"TRL_HOTFIX": "0\n", "TRL_HOTFIX_UNKNOWN_BODY": "try"})
@example(environment={"TRL_HOTFIX_UNKNOWN_BODY": "try\n\x1b[31m"})
@given(environment=environments)
def test_any_variables_are_followed_or_are_one_error_after_which_nothing_has_changed(
    environment: dict[str, str], on_before: bool, two_patches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl_hotfix.apply(only=[PATCH] if on_before else [])
    before = process_state()
    with monkeypatch.context() as context:
        for name, value in environment.items():
            context.setenv(name, value)
        try:
            report = trl_hotfix.apply()
        except trl_hotfix.HotfixError as error:
            message = str(error).split("\n")
        else:
            message = []
    if message:
        assert len(message) < 20
        assert all(line.isprintable() for line in message)
        assert process_state() == before
        return
    reference = getattr(vars(DPOTrainer)["dpo_loss"], "_self_reference", (None, None, ()))
    assert {status.id for status in report if status.state is State.APPLIED} == {
        patch_id for patch_id, *_ in reference[2]
    }


def test_a_strict_apply_that_fails_leaves_the_rule_for_unknown_bodies_as_it_was(declare: Any) -> None:
    declare(lambda module: Outcome(Verdict.FIXED), patched)
    with pytest.raises(trl_hotfix.NotAppliedError):
        trl_hotfix.apply(strict=True, unknown_body="try")
    assert engine.ENGINE._configuration.try_unknown_body is False


def test_a_dry_run_has_the_errors_of_the_real_one(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX_UNKNOWN_BODY", "maybe")
    with pytest.raises(trl_hotfix.SettingError, match="'maybe'"):
        trl_hotfix.apply(dry_run=True)


@pytest.mark.parametrize("rank", ["%(nope)s", "5%", "0\n", "1]\x1b[31m", "x"])
def test_a_rank_that_is_no_number_is_not_part_of_the_line(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord("trl_hotfix", logging.INFO, "", 0, "said", None, None)
    assert _FallbackHandler().format(record) == "trl_hotfix: INFO: said"


@pytest.mark.parametrize("text", ["\udcff", "\u20ac", "two\nlines"])
def test_a_warning_at_start_reaches_an_error_stream_that_takes_ascii_only(text: str, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+", encoding="ascii", errors="strict") as file:
        with contextlib.redirect_stderr(file):
            settings.warn(text)
        file.seek(0)
        assert file.read().startswith("trl_hotfix: WARNING: ")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_warning_at_start_with_nowhere_to_go_ends_nothing(tmp_path: Path) -> None:
    closed = (tmp_path / "stderr").open("w")
    closed.close()
    for nowhere in (closed, Full(), None):
        with contextlib.redirect_stderr(nowhere):  # type: ignore[type-var]
            settings.warn("said")
