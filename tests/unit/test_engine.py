"""The state machine on the real DPOTrainer, with made-up patches that go right and wrong."""

from __future__ import annotations

import itertools
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import trl.trainer.dpo_trainer as leaf
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix import testing
from trl_hotfix.catalogue import modules
from trl_hotfix.model import Option, Outcome, Reason, State, Verdict
from trl_hotfix.patching import engine, self_test
from trl_hotfix.reporting.report import Report

MARK = "patched"


def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A wrapper that can be seen: the made-up bug is that ``dpo_loss`` of a stub does not say so."""
    return MARK


def is_marked(module: ModuleType) -> Outcome:
    trainer = object.__new__(module.DPOTrainer)
    try:
        loss = trainer.dpo_loss(1, 2, 3, 4)
    except AttributeError:
        loss = "raised"
    return Outcome(Verdict.FIXED if loss == MARK else Verdict.REPRODUCED, {"said": loss})


def pass_through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def raises(module: ModuleType) -> Outcome:
    raise RuntimeError("no idea what this release is")


def identity(report: Report, patch_id: str = "made-up") -> tuple[State, Reason]:
    return report[patch_id].state, report[patch_id].reason


@pytest.fixture(autouse=True)
def vars_are_as_before() -> Any:
    before = dict(vars(DPOTrainer))
    yield
    after = dict(vars(DPOTrainer))
    assert set(after) == set(before)
    assert all(after[name] is before[name] for name in before)


def test_applied_carries_the_numbers_before_and_after(declare: Any) -> None:
    declare(is_marked, mark)
    report = trl_hotfix.apply()
    assert identity(report) == (State.APPLIED, Reason.PROVEN)
    evidence = report["made-up"].evidence["trl.trainer.dpo_trainer"]
    assert evidence["red"] == {"verdict": "reproduced", "said": "raised"}
    assert evidence["green"] == {"verdict": "fixed", "said": MARK}
    assert report.ok


def test_apply_twice_is_apply_once(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    declare(is_marked, mark)
    with caplog.at_level(logging.INFO):
        first = trl_hotfix.apply()
        wrapper = vars(DPOTrainer)["dpo_loss"]
        second = trl_hotfix.apply()
    assert second.to_dict() == first.to_dict()
    assert vars(DPOTrainer)["dpo_loss"] is wrapper
    assert caplog.text.count("applied made-up") == 1


def test_a_dry_run_says_what_would_be_and_changes_nothing(declare: Any) -> None:
    declare(is_marked, mark)
    before = list(sys.meta_path)
    report = trl_hotfix.apply(dry_run=True)
    assert identity(report) == (State.PENDING, Reason.APPLIES)
    assert sys.meta_path == before
    assert identity(trl_hotfix.status()) == (State.DISABLED, Reason.SWITCHED_OFF)


def test_another_selection_takes_off_what_leaves_it_and_puts_on_what_enters(declare: Any) -> None:
    declare(is_marked, mark, id="one")
    declare(is_marked, mark, id="two")
    assert identity(trl_hotfix.apply(only=["one"]), "one") == (State.APPLIED, Reason.PROVEN)
    trl_hotfix.revert()
    report = trl_hotfix.apply(only=["two"])
    assert identity(report, "one") == (State.DISABLED, Reason.NOT_SELECTED)
    assert identity(report, "two") == (State.APPLIED, Reason.PROVEN)
    report = trl_hotfix.apply(skip=["two"])
    assert identity(report, "two") == (State.DISABLED, Reason.EXCLUDED)


def test_two_patches_on_one_method_work_together_and_come_off_in_either_order(declare: Any) -> None:
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


def test_revert_then_apply_puts_it_on_again(declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    assert identity(trl_hotfix.revert("made-up")) == (State.REVERTED, Reason.BY_REQUEST)
    assert identity(trl_hotfix.apply()) == (State.APPLIED, Reason.PROVEN)


def test_an_unknown_id_is_an_error_with_a_suggestion_and_changes_nothing(declare: Any) -> None:
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


@pytest.mark.parametrize(
    ("self_test", "wrapper", "attribute", "expected"),
    [
        (is_marked, pass_through, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST)),
        (raises, mark, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST_ERROR)),
        (lambda module: "yes", mark, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST_ERROR)),
        (is_marked, mark, "DPOTrainer.gone", (State.SKIPPED, Reason.MISSING_TARGET)),
        (is_marked, mark, "GoneTrainer.dpo_loss", (State.SKIPPED, Reason.MISSING_TARGET)),
        (is_marked, mark, "DPOTrainer.dpo_loss DPOTrainer._tag_names", (State.FAILED, Reason.INSTALL_ERROR)),
        (lambda module: Outcome(Verdict.FIXED), mark, "DPOTrainer.dpo_loss", (State.SKIPPED, Reason.NOT_REPRODUCED)),
        (lambda module: Outcome(Verdict.ABSENT), mark, "DPOTrainer.dpo_loss", (State.SKIPPED, Reason.NOT_REPRODUCED)),
    ],
)
def test_what_cannot_go_on_is_rolled_back_with_one_warning_or_one_exception_under_strict(
    declare: Any,
    caplog: pytest.LogCaptureFixture,
    self_test: Any,
    wrapper: Any,
    attribute: str,
    expected: tuple[State, Reason],
) -> None:
    declare(self_test, wrapper, attribute=attribute)
    before = dict(vars(DPOTrainer))
    report = trl_hotfix.apply()
    assert identity(report) == expected
    assert report["made-up"].evidence
    assert not report.ok
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert dict(vars(DPOTrainer)) == before

    trl_hotfix.revert()
    with pytest.raises(trl_hotfix.NotAppliedError, match=f"made-up.*{expected[1].value}"):
        trl_hotfix.apply(strict=True)
    assert dict(vars(DPOTrainer)) == before


def test_strict_also_speaks_of_what_failed_in_an_earlier_call(declare: Any) -> None:
    declare(raises, mark)
    trl_hotfix.apply()
    with pytest.raises(trl_hotfix.NotAppliedError, match="self-test-error"):
        trl_hotfix.apply(strict=True)


def test_strict_takes_off_the_others_that_the_same_call_had_put_on(declare: Any) -> None:
    declare(is_marked, mark, id="good")
    declare(raises, mark, id="bad", attribute="DPOTrainer.concatenated_forward")
    with pytest.raises(trl_hotfix.NotAppliedError, match="bad"):
        trl_hotfix.apply(strict=True)
    assert not isinstance(vars(DPOTrainer)["dpo_loss"], trl_hotfix.patching.wrappers.HotfixWrapper)


def test_a_failed_patch_does_not_stop_the_others(declare: Any) -> None:
    declare(raises, mark, id="bad", attribute="DPOTrainer.concatenated_forward")
    declare(is_marked, mark, id="good")
    report = trl_hotfix.apply()
    assert identity(report, "good") == (State.APPLIED, Reason.PROVEN)
    assert "Traceback" in report["bad"].evidence["trl.trainer.dpo_trainer"]["traceback"]


def test_somebody_elses_wrapper_beneath_is_a_conflict_and_names_them(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreign(self: Any, *args: Any) -> str:
        return "foreign"

    declare(is_marked, mark)
    monkeypatch.setattr(DPOTrainer, "dpo_loss", foreign)
    report = trl_hotfix.apply()
    assert identity(report) == (State.CONFLICTED, Reason.FOREIGN_WRAPPER)
    assert __file__ in report["made-up"].evidence["trl.trainer.dpo_trainer"]["by"]
    assert vars(DPOTrainer)["dpo_loss"] is foreign


def test_replaced_later_is_displaced_and_revert_leaves_the_others_work(
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


def test_deleted_later_is_displaced_and_not_resurrected(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    with monkeypatch.context() as context:
        context.delattr(DPOTrainer, "dpo_loss")
        assert identity(trl_hotfix.status()) == (State.DISPLACED, Reason.DELETED)
        assert identity(trl_hotfix.revert()) == (State.DISPLACED, Reason.DELETED)
        assert "dpo_loss" not in vars(DPOTrainer)


def test_a_wrapper_on_top_of_ours_leaves_it_applied_and_is_named(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_patched_puts_back_what_was_on_before(declare: Any) -> None:
    declare(is_marked, mark, id="one")
    with trl_hotfix.patched("one") as report:
        assert identity(report, "one") == (State.APPLIED, Reason.PROVEN)
    assert identity(trl_hotfix.status(), "one") == (State.DISABLED, Reason.SWITCHED_OFF)
    trl_hotfix.apply()
    with trl_hotfix.patched("one"):
        pass
    assert identity(trl_hotfix.status(), "one") == (State.APPLIED, Reason.PROVEN)


def test_patched_comes_off_when_its_body_raises(declare: Any) -> None:
    declare(is_marked, mark)
    with pytest.raises(KeyError), trl_hotfix.patched("made-up"):
        raise KeyError
    assert identity(trl_hotfix.status()) == (State.DISABLED, Reason.SWITCHED_OFF)


def test_patched_raises_where_it_cannot_patch(declare: Any) -> None:
    declare(raises, mark)
    with pytest.raises(trl_hotfix.NotAppliedError), trl_hotfix.patched("made-up"):
        pytest.fail("the body ran")


def test_a_self_test_leaves_no_trace(declare: Any) -> None:
    import random
    import warnings

    import numpy
    import torch

    def messes_up(module: ModuleType) -> Outcome:
        assert torch.get_default_dtype() is torch.float32
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.zeros(1).device.type == "cpu"
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float16)
        warnings.simplefilter("error")
        return is_marked(module)

    def state() -> tuple[Any, ...]:
        return (
            random.getstate(),
            str(numpy.random.get_state()),
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            list(warnings.filters),
        )

    declare(messes_up, mark)
    torch.set_default_dtype(torch.float64)
    try:
        before = state()
        with torch.inference_mode(), torch.device("meta"):
            assert trl_hotfix.apply().ok
        assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_digest_tells_sets_of_repairs_apart_and_nothing_else(declare: Any) -> None:
    declare(is_marked, mark)
    dry = trl_hotfix.apply(dry_run=True).digest
    assert trl_hotfix.apply().digest == dry
    assert trl_hotfix.revert().digest != dry
    assert trl_hotfix.apply().digest == dry


def test_explain_tells_the_trail_and_how_to_turn_it_off(declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    text = trl_hotfix.explain("made-up")
    assert "applied (proven)" in text
    assert "TRL_HOTFIX_SKIP=made-up" in text
    with pytest.raises(trl_hotfix.UnknownPatchError):
        trl_hotfix.explain("made-upp")


def test_a_reloaded_module_is_patched_again() -> None:
    code = (
        "import importlib, trl_hotfix; trl_hotfix.apply(); import trl.trainer.dpo_trainer as leaf\n"
        "first = leaf.DPOTrainer; importlib.reload(leaf)\n"
        "name = lambda c: type(vars(c)['get_batch_loss_metrics']).__name__\n"
        "print(first is leaf.DPOTrainer, name(first), name(leaf.DPOTrainer))\n"
        "trl_hotfix.revert(); print(name(first), name(leaf.DPOTrainer))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-2:] == ["False HotfixWrapper HotfixWrapper", "function function"], (
        process.stderr
    )


def test_a_class_whose_reload_nobody_saw_end_is_patched_when_somebody_looks(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apply() in the middle of a reload patches the class that is there, and the reload then makes another."""
    declare(is_marked, mark)
    trl_hotfix.apply()
    new = type("DPOTrainer", (), {"__module__": leaf.__name__, "dpo_loss": DPOTrainer.dpo_loss.__wrapped__})
    monkeypatch.setattr(leaf, "DPOTrainer", new)
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
    assert object.__new__(new).dpo_loss(1, 2, 3, 4) == MARK


def test_the_variable_comes_before_what_the_script_asks_for_whenever_trl_is_imported() -> None:
    selected, unselected = "moe-aux-loss-lost-under-deepspeed", "dpo-eval-reference-from-trained-policy"
    code = (
        "import os; os.environ['TRL_HOTFIX'] = '1'\nfrom trl_hotfix import autostart, apply, status\n"
        f"autostart.start(); before = status()[{unselected!r}].state.value\n"
        f"apply(only=[{selected!r}]); import trl.trainer.dpo_trainer\n"
        f"print(before, status()[{selected!r}].state.value, status()[{unselected!r}].state.value)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1:] == ["pending applied disabled"], process.stderr


def test_the_leaf_is_the_module_that_the_self_test_gets(declare: Any) -> None:
    got: list[ModuleType] = []

    def test(module: ModuleType) -> Outcome:
        got.append(module)
        return is_marked(module)

    declare(test, mark)
    trl_hotfix.apply()
    assert got == [leaf, leaf]


# Options


def use_the_option(wrapped: Any, instance: Any, args: Any, kwargs: Any, options: Any) -> Any:
    return options["word"]


def returns_the_option(module: ModuleType, options: Any) -> Outcome:
    try:
        loss = object.__new__(module.DPOTrainer).dpo_loss(1, 2, 3, 4)
    except AttributeError:
        loss = "raised"
    return Outcome(Verdict.FIXED if loss == options["word"] else Verdict.REPRODUCED, {"said": loss})


WORDS = {"word": Option({"yes": "one way", "no": "the other"}, "yes")}


def stub_loss() -> Any:
    return object.__new__(DPOTrainer).dpo_loss(1, 2, 3, 4)


def test_options_reach_the_wrapper_and_the_self_test_and_stand_in_the_report(declare: Any) -> None:
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


def test_options_from_the_environment(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    monkeypatch.setenv("TRL_HOTFIX_OPTIONS", "made-up.word=no")
    trl_hotfix.apply()
    assert stub_loss() == "no"


def test_patched_has_other_options_for_a_while(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply(options={"made-up": {"word": "no"}})
    with trl_hotfix.patched("made-up"):
        assert stub_loss() == "no"
    with trl_hotfix.patched("made-up", options={"made-up": {"word": "yes"}}):
        assert stub_loss() == "yes"
    assert stub_loss() == "no"


def test_a_strict_apply_that_fails_leaves_the_options_as_they_were(declare: Any) -> None:
    def only_yes(module: ModuleType, options: Any) -> Outcome:
        outcome = returns_the_option(module, options)
        return Outcome(Verdict.REPRODUCED, outcome.numbers) if options["word"] == "no" else outcome

    declare(only_yes, use_the_option, options=WORDS)
    before = trl_hotfix.apply()
    with pytest.raises(trl_hotfix.NotAppliedError, match="self-test"):
        trl_hotfix.apply(options={"made-up": {"word": "no"}}, strict=True)
    assert stub_loss() == "yes"
    assert trl_hotfix.status().digest == before.digest


def test_options_of_a_patch_that_is_not_for_this_release_are_said_to_do_nothing(
    declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declare(returns_the_option, use_the_option, options=WORDS, trl="<0.9")
    trl_hotfix.apply(options={"made-up": {"word": "no"}})
    assert "the options of made-up do nothing here: skipped (trl-version)" in caplog.text


def test_a_worker_restores_a_patched_function_with_its_options(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply(options={"made-up": {"word": "no"}})
    pickled = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.apply(only=[])
    pickle.loads(pickled)
    assert stub_loss() == "no"


def test_a_pickled_function_puts_its_own_patch_on_again_and_no_other_that_was_reverted(declare: Any) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    verdicts = itertools.cycle([Verdict.REPRODUCED, Verdict.FIXED])
    declare(lambda module: Outcome(next(verdicts)), pass_through, id="another", attribute="DPOTrainer.compute_loss")
    assert trl_hotfix.apply()["another"].state is State.APPLIED
    pickled = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    assert pickle.loads(pickled) is DPOTrainer.dpo_loss
    assert stub_loss() == "yes"
    assert trl_hotfix.status()["another"].state is not State.APPLIED


def test_the_variable_that_turns_all_off_is_stronger_than_a_pickle(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    trl_hotfix.apply()
    pickled = pickle.dumps(DPOTrainer.dpo_loss)
    trl_hotfix.revert()
    monkeypatch.setenv("TRL_HOTFIX", "0")
    assert type(pickle.loads(pickled)) is FunctionType
    assert "TRL_HOTFIX=0: the patches of a pickled function stay off" in caplog.text


def test_a_pickle_of_another_revision_or_of_a_patch_that_is_not_here_says_so(
    declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    patches = (("made-up", 7, (("word", "no"),)), ("gone", 1, ()))
    engine.restore(("trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss", patches), None)
    assert stub_loss() == "no"
    assert "a pickle asks for made-up, revision 7; here it is revision 1" in caplog.text
    assert "a pickle asks for gone, revision 1; here it is not known" in caplog.text


def test_patched_within_patched_has_both_on_also_before_the_module_is_imported(fresh_engine: Any) -> None:
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


# Never a silent no-op, and never the end of the run


def test_a_class_that_defines_the_method_anew_is_not_reached(declare: Any) -> None:
    declare(is_marked, mark)
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED

    class Mine(DPOTrainer):  # type: ignore[misc]
        def dpo_loss(self, *args: Any) -> Any:
            return "mine"

    status = trl_hotfix.status()["made-up"]
    assert (status.state, status.reason, status.degraded) == (State.UNREACHED, Reason.OVERRIDDEN, True)
    assert status.evidence["trl.trainer.dpo_trainer"]["by"].endswith("Mine.dpo_loss")
    with pytest.raises(trl_hotfix.NotAppliedError, match="unreached"):
        trl_hotfix.apply(strict=True)
    del Mine.dpo_loss
    assert trl_hotfix.status()["made-up"].state is State.APPLIED


def test_the_stand_ins_of_self_tests_that_nobody_has_collected_yet_are_nobodys_classes(declare: Any) -> None:
    alive: list[Any] = []

    def with_stand_ins(leaf: Any) -> Any:
        anew = {"dpo_loss": lambda self, *args: "anew", "__module__": modules.module_of("made-up")}
        alive.append(type("Stub", (leaf.DPOTrainer,), anew))
        alive.append(testing.stub_trainer(leaf.DPOTrainer, SimpleNamespace(), dpo_loss=lambda *args: "its own"))
        return is_marked(leaf)

    declare(with_stand_ins, mark)
    assert trl_hotfix.apply(strict=True)["made-up"].state is State.APPLIED
    assert trl_hotfix.status()["made-up"].state is State.APPLIED
    assert alive


def test_a_class_that_calls_trls_method_from_its_own_is_reached(declare: Any) -> None:
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


def test_a_class_that_somebody_regenerates_in_its_module_displaces_the_patch(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    regenerated = type("DPOTrainer", (), {"__module__": "compiled_cache.DPOTrainer"})
    monkeypatch.setattr(leaf, "DPOTrainer", regenerated)
    status = trl_hotfix.status()["made-up"]
    assert (status.state, status.reason) == (State.DISPLACED, Reason.REPLACED)
    assert "compiled_cache.DPOTrainer" in status.evidence["trl.trainer.dpo_trainer"]["by"]


def test_a_wrapper_that_fails_in_a_run_leaves_trl_as_it_is_and_the_status_says_so(
    declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_later(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args[0] == "in the run":
            raise ZeroDivisionError("a mistake of ours")
        return MARK

    declare(is_marked, fails_later)
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    with pytest.raises(AttributeError):  # TRL's own, for a trainer that was never made
        object.__new__(DPOTrainer).dpo_loss("in the run", 2, 3, 4)
    status = trl_hotfix.status()["made-up"]
    assert (status.state, status.reason, status.degraded) == (State.FAILED, Reason.WRAPPER_ERROR, True)
    assert "a mistake of ours" in status.evidence["trl.trainer.dpo_trainer"]["error"]
    assert caplog.text.count("is NOT on any more") == 1


@pytest.mark.parametrize(
    "breaks", [lambda: time.sleep(60), lambda: sys.exit("bye"), lambda: "rubbish"], ids=["hangs", "exits", "rubbish"]
)
def test_a_self_test_that_hangs_exits_or_answers_rubbish_leaves_the_patch_off(
    declare: Any, monkeypatch: pytest.MonkeyPatch, breaks: Any
) -> None:

    monkeypatch.setattr(self_test, "SELF_TEST_SECONDS", 0.2)
    declare(lambda module: breaks(), mark)
    report = trl_hotfix.apply()
    assert identity(report) == (State.FAILED, Reason.SELF_TEST_ERROR)
    with pytest.raises(trl_hotfix.NotAppliedError):
        trl_hotfix.apply(strict=True)


@pytest.mark.parametrize("step", range(6))
def test_a_failure_at_any_step_of_installing_leaves_everything_as_it_was(
    declare: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Three targets: three look-ups of their site and three settings of their attribute; each of the six fails once."""
    from trl_hotfix.patching import sites

    declare(is_marked, mark, attribute="DPOTrainer.dpo_loss DPOTrainer.get_batch_loss_metrics DPOTrainer.compute_loss")
    calls = iter(range(100))

    def failing(function: Any) -> Any:
        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == step:
                raise MemoryError("in the middle")
            return function(*args, **kwargs)

        return fail_once

    before = dict(vars(DPOTrainer))
    monkeypatch.setattr(sites.Sites, "at", failing(sites.Sites.at))
    monkeypatch.setattr(sites.Site, "put_on", failing(sites.Site.put_on))
    assert identity(trl_hotfix.apply()) == (State.FAILED, Reason.INSTALL_ERROR)
    after = dict(vars(DPOTrainer))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_a_module_whose_import_was_missed_is_found_when_somebody_looks(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl_hotfix.patching import engine

    declare(is_marked, mark)
    with monkeypatch.context() as missed:
        missed.setattr(engine.FINDER, "when_imported", lambda leaf, callback: None)
        missed.setattr(engine, "sys", SimpleNamespace(modules={}))
        assert identity(trl_hotfix.apply()) == (State.PENDING, Reason.NOT_IMPORTED)
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
