"""Reports of the gates alone: nothing is imported, tested or patched for them."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.errors import NotAppliedError
from trl_hotfix.model import Reason, State, Strict
from trl_hotfix.patching import previews
from trl_hotfix.selection.selection import Selection

from helpers.made_up_patches import is_marked, mark, raises
from helpers.patch_examples import having


@pytest.mark.parametrize(
    ("trl", "expected"),
    [
        ("0.11.4", (State.PENDING, Reason.APPLIES)),
        ("0.12.0", (State.SKIPPED, Reason.TRL_VERSION)),
        (None, (State.SKIPPED, Reason.NO_TRL)),
    ],
)
def test_a_preview_answers_for_any_version(declare: Any, trl: str | None, expected: tuple[State, Reason]) -> None:
    declared = declare(is_marked, mark, trl=">=0.11,<0.12")
    report = previews.preview([declared], Selection(), having(**({"trl": trl} if trl else {})))
    status = report["made-up"]
    assert (status.state, status.reason) == expected
    assert [target.state for target in status.targets] == [expected[0]]
    assert (report.trl, report.trl_hotfix, report.packs) == (trl, trl_hotfix.__version__, {})


def test_a_preview_runs_no_self_test_and_watches_no_import(declare: Any) -> None:
    declared = declare(raises, mark)
    before = list(sys.meta_path)
    assert previews.preview([declared], Selection())["made-up"].state is State.PENDING
    assert sys.meta_path == before
    assert trl_hotfix.status()["made-up"].reason is Reason.SWITCHED_OFF


def test_a_patch_of_the_freeze_file_that_does_not_apply_is_a_warning(
    declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declare(is_marked, mark, id="here")
    declare(is_marked, mark, id="elsewhere", trl="<0.10")
    selection = Selection(only=frozenset({"here", "elsewhere"}))
    previews.check_frozen(selection, strict=Strict.NOTHING)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["in the freeze file, and not on here: elsewhere: skipped (trl-version)"]
    with pytest.raises(NotAppliedError, match=r"\n  elsewhere: skipped \(trl-version\)$"):
        previews.check_frozen(selection, strict=Strict.ALL)


def test_strict_mode_accepts_a_freeze_file_whose_patches_all_apply(
    declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declare(is_marked, mark)
    previews.check_frozen(Selection(only=frozenset({"made-up"})), strict=Strict.ALL)
    assert caplog.records == []
