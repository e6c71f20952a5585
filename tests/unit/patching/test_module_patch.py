"""The current state of a patch on one module: after a reload, a replacement or an error of its wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import trl.trainer.dpo_trainer as leaf
from helpers.made_up_patches import MARK, identity, is_marked, mark
from helpers.patch_examples import patch
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Decision, Reason, State, Target
from trl_hotfix.patching.module_patch import ModulePatch, status_of
from trl_hotfix.reporting.report import PatchStatus

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


TWO_MODULES = patch(
    targets=(
        Target("trl.made_up_one", "Trainer.step", "wrapper"),
        Target("trl.made_up_two", "Trainer.step", "wrapper", trl="==0.11.0"),
    )
)


def status_with(*decisions: Decision) -> PatchStatus:
    """Return the status of a patch whose module patches have these decisions, or else with that of the gates."""
    module_patches = [
        ModulePatch(TWO_MODULES, target.module, (target,), decision=decision)
        for target, decision in zip(TWO_MODULES.targets, decisions, strict=False)
    ]
    return status_of(TWO_MODULES, "0.11.4", module_patches, Decision(State.PENDING, Reason.APPLIES), {"over": "all"})


def test_without_module_patches_the_gates_decide() -> None:
    status = status_with()
    assert (status.state, status.reason, status.options) == (State.PENDING, Reason.APPLIES, {"over": "all"})
    # The second target has the bug in another release only.
    assert [target.state for target in status.targets] == [State.PENDING, State.SKIPPED]
    assert [target.trl for target in status.targets] == [TWO_MODULES.trl, "==0.11.0"]


def test_a_patch_is_as_bad_as_its_worst_module() -> None:
    pending, failed = Decision(State.PENDING, Reason.NOT_IMPORTED), Decision(State.FAILED, Reason.SELF_TEST, {"x": 1})
    for decisions in ((pending, failed), (failed, pending)):
        status = status_with(*decisions)
        assert (status.state, status.reason) == (State.FAILED, Reason.SELF_TEST)
        assert [target.state for target in status.targets] == [decision.state for decision in decisions]
        assert [dict(evidence) for evidence in status.evidence.values()] == [{"x": 1}]


@pytest.mark.parametrize("state", [state for state in State if state not in (State.DISABLED, State.RETIRED)])
def test_every_state_of_a_module_patch_has_a_rank(state: State) -> None:
    """The gates alone decide on ``disabled`` and ``retired``, so no module patch is in these states."""
    decision = Decision(state, Reason.BY_REQUEST, {"x": 1})
    module_patch = ModulePatch(TWO_MODULES, "trl.made_up_one", (), decision=decision)
    status = status_of(TWO_MODULES, "0.11.4", [module_patch], Decision(State.PENDING, Reason.APPLIES), {})
    assert status.state is state


def test_the_journal_has_a_line_for_each_decision() -> None:
    module_patch = ModulePatch(TWO_MODULES, "trl.made_up_one", ())
    module_patch.note()
    module_patch.decision = Decision(State.FAILED, Reason.SELF_TEST_ERROR, {"error": "ValueError: x"})
    module_patch.note()
    first, second = module_patch.journal
    assert first == "some-patch: trl.made_up_one: pending (not-imported)"
    assert second.startswith("some-patch: trl.made_up_one: failed (self-test-error)")
    assert "ValueError: x" in second
