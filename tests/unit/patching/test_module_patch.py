"""The current state of a patch on one module: after a reload, a replacement or an error of its wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import trl.trainer.dpo_trainer as leaf
from helpers.made_up_patches import MARK, identity, is_marked, mark
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Reason, State

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def test_a_status_after_an_unnoticed_reload_patches_the_class(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """apply() during a reload patches the old class, and the reload then defines a new one."""
    declare(is_marked, mark)
    trl_hotfix.apply()
    new = type("DPOTrainer", (), {"__module__": leaf.__name__, "dpo_loss": DPOTrainer.dpo_loss.__wrapped__})
    monkeypatch.setattr(leaf, "DPOTrainer", new)
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
    assert object.__new__(new).dpo_loss(1, 2, 3, 4) == MARK


def test_a_regenerated_class_displaces_the_patch(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    regenerated = type("DPOTrainer", (), {"__module__": "compiled_cache.DPOTrainer"})
    monkeypatch.setattr(leaf, "DPOTrainer", regenerated)
    status = trl_hotfix.status()["made-up"]
    assert (status.state, status.reason) == (State.DISPLACED, Reason.REPLACED)
    assert "compiled_cache.DPOTrainer" in status.evidence["trl.trainer.dpo_trainer"]["by"]


def test_the_status_reports_a_wrapper_that_failed_in_a_run(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails_later(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args[0] == "in the run":
            raise ZeroDivisionError("a mistake of ours")
        return MARK

    declare(is_marked, fails_later)
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    with pytest.raises(AttributeError):  # raised by TRL: the trainer was never constructed
        object.__new__(DPOTrainer).dpo_loss("in the run", 2, 3, 4)
    status = trl_hotfix.status()["made-up"]
    assert (status.state, status.reason, status.degraded) == (State.FAILED, Reason.WRAPPER_ERROR, True)
    assert "a mistake of ours" in status.evidence["trl.trainer.dpo_trainer"]["error"]
    assert caplog.text.count("is NOT on any more") == 1
