"""A patch on a method that TRL's class has from transformers: TRL's DPOTrainer defines no ``floating_point_ops``."""

from __future__ import annotations

import functools
import gc
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix import witness
from trl_hotfix.matching import digests, fingerprints, inherited
from trl_hotfix.model import Outcome, Reason, State, Verdict

from helpers.made_up_patches import identity

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")

METHOD = "DPOTrainer.floating_point_ops"
INHERITED = "transformers:Trainer.floating_point_ops"


@pytest.fixture(autouse=True)
def no_classes_of_other_tests() -> None:
    """A subclass is asked whether it calls the patched method as long as it exists."""
    gc.collect()


def double(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) * 2


def operations(cls: type = DPOTrainer) -> float:
    """Return the operations of a step of a trainer whose model says that they are 3."""
    trainer: Any = object.__new__(cls)
    trainer.model = SimpleNamespace(floating_point_ops=lambda inputs: 3)
    return float(trainer.floating_point_ops({}))


def is_doubled(module: ModuleType) -> Outcome:
    found = operations(module.DPOTrainer)
    return Outcome(Verdict.FIXED if found % 6 == 0 else Verdict.REPRODUCED, {"measured": found})


def test_the_wrapper_stands_on_trls_class_alone_and_comes_off_exactly(declare: Any) -> None:
    declare(is_doubled, double, attribute=METHOD)
    before = {cls: list(vars(cls).items()) for cls in (DPOTrainer, transformers.Trainer)}
    assert identity(trl_hotfix.apply()) == (State.APPLIED, Reason.PROVEN)
    assert "floating_point_ops" in vars(DPOTrainer)
    assert list(vars(transformers.Trainer).items()) == before[transformers.Trainer]
    assert (operations(), operations(transformers.Trainer)) == (6, 3)
    trl_hotfix.revert()
    assert {cls: list(vars(cls).items()) for cls in before} == before
    assert operations() == 3


def test_two_patches_on_one_inherited_method_compose(declare: Any) -> None:
    declare(is_doubled, double, attribute=METHOD)
    declare(
        lambda module: Outcome(Verdict.FIXED if operations() > 6 else Verdict.REPRODUCED),
        double,
        id="other",
        attribute=METHOD,
    )
    report = trl_hotfix.apply()
    assert {identity(report, name) for name in ("made-up", "other")} == {(State.APPLIED, Reason.PROVEN)}
    assert operations() == 12
    trl_hotfix.revert()
    assert "floating_point_ops" not in vars(DPOTrainer)


def test_a_patch_on_a_class_and_on_its_base_acts_once(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.dpo_trainer as module

    class OnlineTrainer(DPOTrainer):  # type: ignore[misc]
        __module__ = module.__name__

    monkeypatch.setattr(module, "OnlineTrainer", OnlineTrainer, raising=False)
    declare(is_doubled, double, attribute=f"OnlineTrainer.floating_point_ops {METHOD}")
    assert identity(trl_hotfix.apply()) == (State.APPLIED, Reason.PROVEN)
    assert (operations(), operations(OnlineTrainer)) == (6, 6)
    assert trl_hotfix.status().ok


def test_the_method_of_a_users_subclass_is_asked_for(declare: Any) -> None:
    declare(is_doubled, double, attribute=METHOD)
    trl_hotfix.apply()

    class CallsIt(DPOTrainer):  # type: ignore[misc]
        def floating_point_ops(self, *args: Any) -> Any:
            return super().floating_point_ops(*args) * 10

    assert operations(CallsIt) == 60
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)

    class GoesPastIt(DPOTrainer):  # type: ignore[misc]
        def floating_point_ops(self, *args: Any) -> Any:
            return transformers.Trainer.floating_point_ops(self, *args)

    assert operations(GoesPastIt) == 3
    # Only a trainer of this class, once it has trained, is not reached.
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)


def test_a_base_in_between_is_beneath_the_patch(declare: Any) -> None:
    declare(is_doubled, double, attribute=METHOD)
    trl_hotfix.apply()

    class Own(transformers.Trainer):  # type: ignore[misc]
        def floating_point_ops(self, *args: Any) -> Any:
            return 7

    class Mixed(DPOTrainer, Own):  # type: ignore[misc]
        pass

    assert operations(Mixed) == 14
    assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)


def test_what_other_code_has_put_on_transformers_is_a_conflict(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_doubled, double, attribute=METHOD)
    monkeypatch.setattr(transformers.Trainer, "floating_point_ops", lambda self, *args: 5)
    assert identity(trl_hotfix.apply()) == (State.CONFLICTED, Reason.FOREIGN_WRAPPER)
    assert "floating_point_ops" not in vars(DPOTrainer)


def test_what_other_code_puts_on_transformers_later_is_called_and_told(
    declare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(is_doubled, double, attribute=METHOD)
    trl_hotfix.apply()
    original = transformers.Trainer.floating_point_ops

    @functools.wraps(original)
    def timed(self: Any, *args: Any) -> Any:
        return original(self, *args) * 100

    with monkeypatch.context() as context:
        context.setattr(transformers.Trainer, "floating_point_ops", timed)
        assert operations() == 600
        assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
        context.setattr(transformers.Trainer, "floating_point_ops", lambda self, *args: 5)
        assert operations() == 10
        assert identity(trl_hotfix.status()) == (State.DISPLACED, Reason.REPLACED)
    assert identity(trl_hotfix.revert()) == (State.REVERTED, Reason.BY_REQUEST)


def test_the_calls_of_a_trainer_are_counted_for_it(declare: Any) -> None:
    patch = declare(is_doubled, double, attribute=METHOD)
    trl_hotfix.apply()
    before = witness.totals().get(patch.id, witness.Count()).called
    trainer: Any = object.__new__(DPOTrainer)
    with pytest.raises(AttributeError):
        trainer.floating_point_ops({})
    count = witness.counts_of(patch.id, patch.targets[0].name).known(trainer)
    assert count is not None
    assert count.called == 1
    assert witness.totals()[patch.id].called > before


BODY = digests.loaded(transformers.Trainer.floating_point_ops).digest


@pytest.mark.parametrize(
    ("verdict", "own", "expected"),
    [
        ("buggy", None, (State.APPLIED, Reason.PROVEN)),
        (None, None, (State.SKIPPED, Reason.UNKNOWN_BODY)),
        ("fixed", None, (State.SKIPPED, Reason.ALREADY_FIXED)),
        # The release defines the method itself, and somebody has deleted it.
        ("buggy", "c1:0", (State.CONFLICTED, Reason.DELETED)),
    ],
)
def test_the_inherited_body_decides(
    declare: Any, monkeypatch: pytest.MonkeyPatch, verdict: str | None, own: str | None, expected: Any
) -> None:
    asked = []

    def verdict_on(patch: str, target: str, body: str) -> str | None:
        asked.append(body)
        return verdict

    declare(is_doubled, double, attribute=METHOD)
    on_record = SimpleNamespace(verdict=verdict_on, at=lambda target, release: own)
    monkeypatch.setattr(fingerprints, "bodies", lambda: on_record)
    assert identity(trl_hotfix.apply()) == expected
    assert asked == ([] if own else [BODY])
    trl_hotfix.revert()


def test_the_body_is_the_one_on_record_for_this_transformers() -> None:
    assert inherited.body_of(INHERITED, transformers.__version__) == BODY
