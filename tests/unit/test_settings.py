"""Any values of the environment variables are followed, or are one error that changes nothing."""

from __future__ import annotations

import contextlib
import io
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
from trl_hotfix.model import Option, Outcome, State, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.patching.wrappers import reference_of

PATCH, OTHER = "made-up", "other-one"
VARIABLES = ("TRL_HOTFIX", *(f"TRL_HOTFIX_{name}" for name in ("ONLY", "SKIP", "OPTIONS", "UNKNOWN_BODY", "PACKS")))


# An environment holds no NUL, and bytes that are not UTF-8 as lone surrogates.
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
    """Return what an error must not change: TRL, the import system, and the state of the engine."""
    current = engine.ENGINE
    return dict(vars(DPOTrainer)), list(sys.meta_path), str(current.status()), current._configuration


@pytest.mark.parametrize("on_before", [True, False])
@hypothesis_settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(environment={"TRL_HOTFIX_ONLY": "x" * 100_000})
@example(environment={"TRL_HOTFIX_ONLY": ",".join(f"made-u-{number}" for number in range(10_000))})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.over=" + "x" * 100_000})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up." + "x" * 100_000 + "=all"})
@example(environment={"TRL_HOTFIX_OPTIONS": "x" * 100_000})
@example(environment={"TRL_HOTFIX_OPTIONS": "x" * 100_000 + ".over=all"})
@example(environment={"TRL_HOTFIX_UNKNOWN_BODY": "x" * 100_000})
@example(environment={"TRL_HOTFIX_PACKS": "x" * 100_000})
@example(environment={"TRL_HOTFIX_ONLY": "@" + "x" * 100_000})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.over=\x1b[31m\n"})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.\x1b[31m\n=all"})
@example(environment={"TRL_HOTFIX_OPTIONS": "made-up.over=none", "TRL_HOTFIX_SKIP": PATCH})
@example(environment={"TRL_HOTFIX": "strict-all", "TRL_HOTFIX_ONLY": PATCH, "TRL_HOTFIX_UNKNOWN_BODY": "try"})
@example(environment={"TRL_HOTFIX": "0\n", "TRL_HOTFIX_UNKNOWN_BODY": "try"})
@example(environment={"TRL_HOTFIX_UNKNOWN_BODY": "try\n\x1b[31m"})
@given(environment=environments)
def test_any_variables_are_followed_or_one_harmless_error(
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
        assert all(line.isprintable() and len(line) < 2000 for line in message)
        assert process_state() == before
        return
    reference = reference_of(vars(DPOTrainer)["dpo_loss"]) or ("", "", ())
    assert {status.id for status in report if status.state is State.APPLIED} == {
        patch_id for patch_id, *_ in reference[2]
    }


# Warnings at start


@pytest.mark.parametrize("text", ["\udcff", "\u20ac", "two\nlines"])
def test_a_warning_reaches_an_ascii_error_stream(text: str, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+", encoding="ascii", errors="strict") as file:
        with contextlib.redirect_stderr(file):
            settings.warn(text, "made-up")
        file.seek(0)
        assert file.read().startswith("trl_hotfix: WARNING: ")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_warning_without_a_stream_raises_nothing(tmp_path: Path) -> None:
    closed = (tmp_path / "stderr").open("w")
    closed.close()
    for nowhere in (closed, Full(), None):
        with contextlib.redirect_stderr(nowhere):  # type: ignore[type-var]
            settings.warn("said", "made-up")
