"""Methods that other libraries wrap, replace, delete or override."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix import testing
from trl_hotfix.catalogue import modules
from trl_hotfix.model import Reason, State

from helpers.made_up_patches import MARK, identity, is_marked, mark

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def test_a_foreign_wrapper_beneath_is_a_named_conflict(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(self: Any, *args: Any) -> str:
        return "foreign"

    declare(is_marked, mark)
    monkeypatch.setattr(DPOTrainer, "dpo_loss", foreign)
    report = trl_hotfix.apply()
    assert identity(report) == (State.CONFLICTED, Reason.FOREIGN_WRAPPER)
    assert __file__ in report["made-up"].evidence["trl.trainer.dpo_trainer"]["by"]
    assert vars(DPOTrainer)["dpo_loss"] is foreign


def test_a_replaced_method_is_displaced_and_left_alone(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def foreign(self: Any) -> None: ...

    declare(is_marked, mark)
    trl_hotfix.apply()
    with monkeypatch.context() as context:
        context.setattr(DPOTrainer, "dpo_loss", foreign)
        assert identity(trl_hotfix.status()) == (State.DISPLACED, Reason.REPLACED)
        assert identity(trl_hotfix.revert()) == (State.DISPLACED, Reason.REPLACED)
        assert vars(DPOTrainer)["dpo_loss"] is foreign
    assert identity(trl_hotfix.revert()) == (State.REVERTED, Reason.BY_REQUEST)


def test_a_deleted_method_is_displaced_and_stays_deleted(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    with monkeypatch.context() as context:
        context.delattr(DPOTrainer, "dpo_loss")
        assert identity(trl_hotfix.status()) == (State.DISPLACED, Reason.DELETED)
        assert identity(trl_hotfix.revert()) == (State.DISPLACED, Reason.DELETED)
        assert "dpo_loss" not in vars(DPOTrainer)


def test_a_foreign_wrapper_on_top_is_named(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    declare(is_marked, mark)
    trl_hotfix.apply()
    installed = vars(DPOTrainer)["dpo_loss"]

    @functools.wraps(installed)
    def on_top(self: Any, *args: Any) -> Any:
        return installed.__get__(self)(*args)

    with monkeypatch.context() as context:
        context.setattr(DPOTrainer, "dpo_loss", on_top)
        report = trl_hotfix.status()
        assert identity(report) == (State.APPLIED, Reason.PROVEN)
        assert __file__ in report["made-up"].evidence["trl.trainer.dpo_trainer"]["beneath"]


# Subclasses


def test_uncollected_stubs_of_self_tests_are_ignored(declare: Any) -> None:
    alive: list[Any] = []

    def with_stand_ins(leaf: Any) -> Any:
        anew = {"dpo_loss": lambda self, *args: "anew", "__module__": modules.module_of("made-up")}
        alive.append(type("Stub", (leaf.DPOTrainer,), anew))
        alive.append(testing.stub_trainer(leaf.DPOTrainer, SimpleNamespace(), dpo_loss=lambda *args: "its own"))
        return is_marked(leaf)

    declare(with_stand_ins, mark)
    assert trl_hotfix.apply(strict="all")["made-up"].state is State.APPLIED
    assert trl_hotfix.status()["made-up"].state is State.APPLIED
    assert alive


def test_a_subclass_that_calls_the_original_is_reached(declare: Any) -> None:
    declare(is_marked, mark)

    class BySuper(DPOTrainer):  # type: ignore[misc]
        def dpo_loss(self, *args: Any) -> Any:
            return super().dpo_loss(*args)

    class ByName(DPOTrainer):  # type: ignore[misc]
        def dpo_loss(self, *args: Any) -> Any:
            return [DPOTrainer.dpo_loss(self, *args) for _ in range(1)]

    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    assert object.__new__(BySuper).dpo_loss(1, 2, 3, 4) == MARK
    assert object.__new__(ByName).dpo_loss(1, 2, 3, 4) == [MARK]
