"""Whether a patch still stands: after a reload, a replacement or an error of its wrapper, and beneath other code."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import trl.trainer.dpo_trainer as leaf
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Called, Decision, Reason, State, Target
from trl_hotfix.patching import engine
from trl_hotfix.patching.breaker import Breaker
from trl_hotfix.patching.module_patch import ModulePatch
from trl_hotfix.patching.standing import overtaken, status_of
from trl_hotfix.reporting.report import PatchStatus

from helpers.made_up_patches import MARK, identity, is_marked, mark, pass_through
from helpers.patch_examples import patch
from helpers.trl_like import NAME, SOURCE, double, doubles

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
        ModulePatch(TWO_MODULES, target.module, (target,), Breaker("some-patch"), decision=decision)
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
    module_patch = ModulePatch(TWO_MODULES, "trl.made_up_one", (), Breaker("some-patch"), decision=decision)
    status = status_of(TWO_MODULES, "0.11.4", [module_patch], Decision(State.PENDING, Reason.APPLIES), {})
    assert status.state is state


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (State.PENDING, State.APPLIED),
        (State.OBSERVED, State.OBSERVED),
        (State.SKIPPED, State.SKIPPED),
        (State.UNREACHED, State.UNREACHED),
    ],
)
def test_a_patch_on_in_one_module_only_is_as_the_other(second: State, expected: State) -> None:
    applied = Decision(State.APPLIED, Reason.PROVEN)
    assert status_with(applied, Decision(second, Reason.BY_REQUEST)).state is expected


def test_a_status_has_the_calls_and_the_acts_of_the_patch(declare: Any) -> None:
    declare(is_marked, mark)
    declare(is_marked, pass_through, id="other", attribute="DPOTrainer.concatenated_forward", trl="<0.10")
    trl_hotfix.apply()
    before = trl_hotfix.status()["made-up"]
    trainer = object.__new__(DPOTrainer)
    for _ in range(3):
        trainer.dpo_loss(1)
    status = trl_hotfix.status()["made-up"]
    assert (status.called - before.called, status.acted - before.acted) == (3, 3)
    assert trl_hotfix.status()["other"].called == 0


def test_code_on_top_that_calls_the_wrapper_is_evidence(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    ours = DPOTrainer.dpo_loss

    def on_top(self: Any, *args: Any) -> Any:
        return ours(self, *args)

    with monkeypatch.context() as on:
        on.setattr(DPOTrainer, "dpo_loss", on_top)
        status = trl_hotfix.status()["made-up"]
        assert status.state is State.APPLIED
        assert "on_top" in status.evidence["trl.trainer.dpo_trainer"]["beneath"]
        on.setattr(DPOTrainer, "dpo_loss", lambda self, *args: 1)
        assert identity(trl_hotfix.status()) == (State.DISPLACED, Reason.REPLACED)


def test_what_is_worse_than_unreached_comes_first(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that has failed, or is off its target, reaches no trainer, and that is the reason to name."""
    before = object.__new__(DPOTrainer)
    before.callback_handler = None
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    assert identity(trl_hotfix.apply()) == (State.UNREACHED, Reason.MADE_BEFORE)
    with monkeypatch.context() as replaced:
        replaced.setattr(DPOTrainer, "dpo_loss", lambda self: 1)
        assert identity(trl_hotfix.status()) == (State.DISPLACED, Reason.REPLACED)
    (module_patch,) = engine.ENGINE.module_patches()
    module_patch.breaker.broken, module_patch.breaker.error = True, "ValueError: x"
    assert identity(trl_hotfix.status()) == (State.FAILED, Reason.WRAPPER_ERROR)


def test_each_trainer_that_is_missed_for_the_same_reason_is_named_once(declare: Any) -> None:
    first, second = object.__new__(DPOTrainer), object.__new__(type("Mine", (DPOTrainer,), {"__module__": "project"}))
    third = object.__new__(DPOTrainer)
    for trainer in (first, second, third):
        vars(trainer)["callback_handler"] = None
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    trl_hotfix.apply()
    (evidence,) = engine.ENGINE.status([first, second, third])["made-up"].evidence.values()
    assert evidence["by"] == (
        "a trl.trainer.dpo_trainer.DPOTrainer was made before the patch went on; "
        "a project.Mine was made before the patch went on"
    )


def test_an_observed_patch_whose_counting_fails_says_so(declare: Any) -> None:
    declare(is_marked, mark)
    assert identity(trl_hotfix.apply(observe=True)) == (State.OBSERVED, Reason.REPRODUCED)
    (module_patch,) = engine.ENGINE.module_patches()
    module_patch.breaker.broken, module_patch.breaker.error = True, "ValueError: x"
    status = trl_hotfix.status()["made-up"]
    assert (status.state, status.reason) == (State.FAILED, Reason.WRAPPER_ERROR)
    assert status.evidence["trl.trainer.dpo_trainer"]["error"] == "ValueError: x"


# Overtaken by a reload


@pytest.mark.parametrize("observe", [False, True])
def test_a_class_that_is_defined_anew_has_overtaken_the_patch(
    declare: Any, monkeypatch: pytest.MonkeyPatch, observe: bool
) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply(observe=observe)
    (module_patch,) = engine.ENGINE.module_patches()
    assert not overtaken(module_patch)
    new = type("DPOTrainer", (), {"__module__": leaf.__name__})
    with monkeypatch.context() as reloaded:
        reloaded.setattr(leaf, "DPOTrainer", new)
        assert overtaken(module_patch)
        # A class of another module is not one of a reload.
        new.__module__ = "compiled_cache"
        assert not overtaken(module_patch)
    with monkeypatch.context() as forgotten:
        forgotten.delitem(sys.modules, leaf.__name__)
        assert not overtaken(module_patch)
    trl_hotfix.revert()
    monkeypatch.setattr(leaf, "DPOTrainer", type("DPOTrainer", (), {"__module__": leaf.__name__}))
    assert not overtaken(module_patch)


def test_a_function_that_is_defined_anew_has_overtaken_the_patch(declare: Any, trl_like: Any) -> None:
    declare(doubles("scaled"), double, attribute="scaled", module=NAME)
    trl_hotfix.apply()
    (module_patch,) = engine.ENGINE.module_patches()
    assert not overtaken(module_patch)
    exec(compile(SOURCE, str(trl_like.path), "exec"), vars(trl_like.module))
    assert overtaken(module_patch)
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
    assert trl_like.module.scaled(1) == 2
