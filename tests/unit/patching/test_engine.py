"""The states of a patch, with made-up patches of the real DPOTrainer."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import trl.trainer.dpo_trainer as leaf
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, Reason, State, Verdict
from trl_hotfix.patching import engine

from helpers.made_up_patches import (
    MARK,
    WORDS,
    identity,
    is_marked,
    mark,
    raises,
    returns_the_option,
    stub_loss,
    use_the_option,
)

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def test_an_applied_patch_reports_the_numbers_of_both_runs(declare: Any) -> None:
    declare(is_marked, mark)
    report = trl_hotfix.apply()
    assert identity(report) == (State.APPLIED, Reason.PROVEN)
    evidence = report["made-up"].evidence["trl.trainer.dpo_trainer"]
    assert evidence["red"] == {"verdict": "reproduced", "said": "raised"}
    assert evidence["green"] == {"verdict": "fixed", "said": MARK}
    assert report.ok


def test_a_dry_run_reports_and_changes_nothing(declare: Any) -> None:
    declare(is_marked, mark)
    before = list(sys.meta_path)
    report = trl_hotfix.apply(dry_run=True)
    assert identity(report) == (State.PENDING, Reason.APPLIES)
    assert sys.meta_path == before
    assert identity(trl_hotfix.status()) == (State.DISABLED, Reason.SWITCHED_OFF)


def test_a_new_selection_reverts_and_applies(declare: Any) -> None:
    declare(is_marked, mark, id="one")
    declare(is_marked, mark, id="two")
    assert identity(trl_hotfix.apply(only=["one"]), "one") == (State.APPLIED, Reason.PROVEN)
    trl_hotfix.revert()
    report = trl_hotfix.apply(only=["two"])
    assert identity(report, "one") == (State.DISABLED, Reason.NOT_SELECTED)
    assert identity(report, "two") == (State.APPLIED, Reason.PROVEN)
    report = trl_hotfix.apply(skip=["two"])
    assert identity(report, "two") == (State.DISABLED, Reason.EXCLUDED)


def test_two_patches_of_a_method_are_reverted_in_either_order(declare: Any) -> None:
    def test_and_wrapper(position: int) -> tuple[Any, Any]:
        def append_position(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            instance.positions.append(position)
            return wrapped(*args, **kwargs) if position else MARK

        def test(module: ModuleType) -> Outcome:
            trainer = object.__new__(module.DPOTrainer)
            trainer.positions = []
            with suppress(AttributeError):
                trainer.dpo_loss(1, 2, 3, 4)
            return Outcome(Verdict.FIXED if position in trainer.positions else Verdict.REPRODUCED)

        return test, append_position

    for position, name in enumerate(("one", "two")):
        declare(*test_and_wrapper(position), id=name)
    for first, second in (("one", "two"), ("two", "one")):
        assert trl_hotfix.apply().ok
        trainer = object.__new__(DPOTrainer)
        trainer.positions = []
        assert trainer.dpo_loss(1, 2, 3, 4) == MARK
        assert trainer.positions == [1, 0]
        assert identity(trl_hotfix.revert(first), second)[0] is State.APPLIED
        assert identity(trl_hotfix.revert(second), second)[0] is State.REVERTED


def test_a_failed_patch_does_not_stop_the_others(declare: Any) -> None:
    declare(raises, mark, id="bad", attribute="DPOTrainer.concatenated_forward")
    declare(is_marked, mark, id="good")
    report = trl_hotfix.apply()
    assert identity(report, "good") == (State.APPLIED, Reason.PROVEN)
    assert "Traceback" in report["bad"].evidence["trl.trainer.dpo_trainer"]["traceback"]


def test_the_self_test_gets_the_patched_module(declare: Any) -> None:
    got: list[ModuleType] = []

    def test(module: ModuleType) -> Outcome:
        got.append(module)
        return is_marked(module)

    declare(test, mark)
    trl_hotfix.apply()
    assert got == [leaf, leaf]


# Reloads and late imports


def test_a_reloaded_module_is_patched_again() -> None:
    code = (
        "import importlib, trl_hotfix; trl_hotfix.apply(); import trl.trainer.dpo_trainer as leaf\n"
        "first = leaf.DPOTrainer; importlib.reload(leaf)\n"
        "name = lambda c: vars(c)['get_batch_loss_metrics'].__module__.rpartition('.')[2]\n"
        "print(first is leaf.DPOTrainer, name(first), name(leaf.DPOTrainer))\n"
        "trl_hotfix.revert(); print(name(first), name(leaf.DPOTrainer))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-2:] == ["False pickled pickled", "dpo_trainer dpo_trainer"], process.stderr


def test_a_status_after_a_missed_import_patches_the_module(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    declare(is_marked, mark)
    with monkeypatch.context() as missed:
        missed.setattr(engine.FINDER, "when_imported", lambda leaf, callback: None)
        missed.setattr(engine, "sys", SimpleNamespace(modules={}))
        assert identity(trl_hotfix.apply()) == (State.PENDING, Reason.NOT_IMPORTED)
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)


# Options


def test_options_reach_wrapper_self_test_and_report(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    report = trl_hotfix.apply()
    assert identity(report) == (State.APPLIED, Reason.PROVEN)
    assert stub_loss() == "yes"
    assert report.to_dict()["patches"][0]["options"] == {"word": "yes"}
    changed = trl_hotfix.apply(options={"made-up": {"word": "no"}})
    assert identity(changed) == (State.APPLIED, Reason.PROVEN)
    assert stub_loss() == "no"
    assert changed["made-up"].evidence["trl.trainer.dpo_trainer"]["green"]["said"] == "no"
    assert changed["made-up"].options == {"word": "no"}
    assert changed.digest != report.digest
    assert trl_hotfix.apply().digest == report.digest
    assert stub_loss() == "yes"


def test_options_are_read_from_the_environment(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    monkeypatch.setenv("TRL_HOTFIX_OPTIONS", "made-up.word=no")
    trl_hotfix.apply()
    assert stub_loss() == "no"


def test_options_of_a_skipped_patch_are_reported_as_unused(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    declare(returns_the_option, use_the_option, options=WORDS, trl="<0.9")
    trl_hotfix.apply(options={"made-up": {"word": "no"}})
    assert "the options of made-up do nothing here: skipped (trl-version)" in caplog.text
