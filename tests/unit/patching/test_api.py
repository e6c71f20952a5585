"""``apply``, ``revert``, ``status`` and ``patched``."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, Reason, State, Verdict
from trl_hotfix.patching import engine

from helpers.made_up_patches import (
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


def test_apply_twice_is_apply_once(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    declare(is_marked, mark)
    with caplog.at_level(logging.INFO):
        first = trl_hotfix.apply()
        wrapper = vars(DPOTrainer)["dpo_loss"]
        second = trl_hotfix.apply()
    assert second.to_dict() == first.to_dict()
    assert vars(DPOTrainer)["dpo_loss"] is wrapper
    assert caplog.text.count("1 repair on for DPO") == 1


def test_apply_after_revert_applies_again(declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    assert identity(trl_hotfix.revert("made-up")) == (State.REVERTED, Reason.BY_REQUEST)
    assert identity(trl_hotfix.apply()) == (State.APPLIED, Reason.PROVEN)


def test_an_unknown_id_is_an_error_with_a_suggestion(declare: Any) -> None:
    declare(is_marked, mark)
    calls: list[Callable[[], Any]] = [
        lambda: trl_hotfix.apply(only=["made-upp"]),
        lambda: trl_hotfix.apply(skip=["made-upp"]),
        lambda: trl_hotfix.revert("made-upp"),
    ]
    for call in calls:
        with pytest.raises(trl_hotfix.UnknownPatchError, match=r"'made-upp'; did you mean 'made-up'\?"):
            call()
    assert identity(trl_hotfix.status()) == (State.DISABLED, Reason.SWITCHED_OFF)


# strict


def test_strict_reports_a_failure_of_an_earlier_call(declare: Any) -> None:
    declare(raises, mark)
    trl_hotfix.apply()
    with pytest.raises(trl_hotfix.NotAppliedError, match="self-test-error"):
        trl_hotfix.apply(strict="all")


def test_strict_takes_off_what_the_same_call_applied(declare: Any) -> None:
    declare(is_marked, mark, id="good")
    declare(raises, mark, id="bad", attribute="DPOTrainer.concatenated_forward")
    with pytest.raises(trl_hotfix.NotAppliedError, match="bad"):
        trl_hotfix.apply(strict="all")
    assert trl_hotfix.patching.wrappers.reference_of(vars(DPOTrainer)["dpo_loss"]) is None


def test_a_failed_strict_apply_keeps_the_options(declare: Any) -> None:
    def only_yes(module: ModuleType, options: Any) -> Outcome:
        outcome = returns_the_option(module, options)
        return Outcome(Verdict.REPRODUCED, outcome.numbers) if options["word"] == "no" else outcome

    declare(only_yes, use_the_option, options=WORDS)
    before = trl_hotfix.apply()
    with pytest.raises(trl_hotfix.NotAppliedError, match="self-test"):
        trl_hotfix.apply(options={"made-up": {"word": "no"}}, strict="all")
    assert stub_loss() == "yes"
    assert trl_hotfix.status().digest == before.digest


# patched


def test_patched_restores_the_previous_state(declare: Any) -> None:
    declare(is_marked, mark, id="one")
    with trl_hotfix.patched("one") as report:
        assert identity(report, "one") == (State.APPLIED, Reason.PROVEN)
    assert identity(trl_hotfix.status(), "one") == (State.DISABLED, Reason.SWITCHED_OFF)
    trl_hotfix.apply()
    with trl_hotfix.patched("one"):
        pass
    assert identity(trl_hotfix.status(), "one") == (State.APPLIED, Reason.PROVEN)


def test_patched_is_reverted_when_its_body_raises(declare: Any) -> None:
    declare(is_marked, mark)
    with pytest.raises(KeyError), trl_hotfix.patched("made-up"):
        raise KeyError
    assert identity(trl_hotfix.status()) == (State.DISABLED, Reason.SWITCHED_OFF)


def test_patched_raises_when_it_cannot_patch(declare: Any) -> None:
    declare(raises, mark)
    with pytest.raises(trl_hotfix.NotAppliedError), trl_hotfix.patched("made-up"):
        pytest.fail("the body ran")


def test_patched_changes_the_options_temporarily(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply(options={"made-up": {"word": "no"}})
    with trl_hotfix.patched("made-up"):
        assert stub_loss() == "no"
    with trl_hotfix.patched("made-up", options={"made-up": {"word": "yes"}}):
        assert stub_loss() == "yes"
    assert stub_loss() == "no"


def test_nested_patched_works_before_the_import(fresh_engine: Any) -> None:
    code = (
        "import trl_hotfix, sys\n"
        "one, other = 'moe-aux-loss-lost-under-deepspeed', 'dpo-eval-reference-from-trained-policy'\n"
        "with trl_hotfix.patched(one), trl_hotfix.patched(other) as report:\n"
        "    assert {report[one].state.value, report[other].state.value} == {'pending'}\n"
        "    import trl.trainer.dpo_trainer\n"
        "    print([trl_hotfix.status()[patch_id].state.value for patch_id in (one, other)])\n"
        "print([trl_hotfix.status()[patch_id].state.value for patch_id in (one, other)])\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-2:] == ["['applied', 'applied']", "['disabled', 'disabled']"], process.stderr


def patched(wrapped: Any, instance: Any, args: Any, kwargs: Any, **_: Any) -> Any:
    return "patched"


def test_a_failed_strict_apply_keeps_the_unknown_body_rule(declare: Any) -> None:
    declare(lambda module: Outcome(Verdict.FIXED), patched)
    with pytest.raises(trl_hotfix.NotAppliedError):
        trl_hotfix.apply(strict="all", unknown_body="try")
    assert engine.ENGINE._configuration.try_unknown_body is False


def test_a_dry_run_raises_the_errors_of_apply(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX_UNKNOWN_BODY", "maybe")
    with pytest.raises(trl_hotfix.SettingError, match="'maybe'"):
        trl_hotfix.apply(dry_run=True)


def test_a_former_id_is_as_good_as_the_present_one(declare: Any) -> None:
    declare(is_marked, mark, formerly=("old-name",))
    assert trl_hotfix.apply(only=["old-name"])["made-up"].state is State.APPLIED
    assert trl_hotfix.explain("old-name") == trl_hotfix.explain("made-up")
    assert trl_hotfix.revert("old-name")["made-up"].state is State.REVERTED
    assert trl_hotfix.apply(skip=["old-name"])["made-up"].state is State.DISABLED
    with trl_hotfix.patched("old-name") as report:
        assert report["made-up"].state is State.APPLIED


def test_a_switch_that_is_not_understood_is_an_error_of_the_call_too(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(is_marked, mark)
    monkeypatch.setenv("TRL_HOTFIX", "stict")
    with pytest.raises(trl_hotfix.SettingError, match=r"TRL_HOTFIX='stict' is not understood; did you mean 'strict'"):
        trl_hotfix.apply()


def test_switched_off_the_variables_need_not_be_right(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    for name, value in {"": "0", "_ONLY": "@/no/such/file", "_OPTIONS": "x", "_PACKS": "nobodys"}.items():
        monkeypatch.setenv(f"TRL_HOTFIX{name}", value)
    assert trl_hotfix.apply()["made-up"].state is State.DISABLED
    with pytest.raises(trl_hotfix.UnknownPatchError, match=r"in skip=: 'nonsense'"):
        trl_hotfix.apply(skip=["nonsense"])
