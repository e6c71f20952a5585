"""A process that observes changes nothing: it reproduces the bugs, counts calls, and leaves TRL as it is."""

from __future__ import annotations

import asyncio
import copyreg
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import dill
import pytest
from trl.trainer import dpo_trainer, utils
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix import witness
from trl_hotfix.model import Outcome, Reason, State, Verdict
from trl_hotfix.patching import engine, given

from helpers import sample_trainers
from helpers.made_up_patches import MARK, identity, is_marked, mark, raises, stub_loss
from helpers.sample_trainers import Trainer, layer, site_of

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")

# Pickling an instance notes this in its class, which is to be as it was after each test.
copyreg._slotnames(DPOTrainer)  # type: ignore[attr-defined]

OBSERVED = (State.OBSERVED, Reason.REPRODUCED)
APPLIED = (State.APPLIED, Reason.PROVEN)
TARGET = ("made-up", "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss")


def is_unpatched() -> bool:
    """Return whether the made-up bug is here: TRL's own function needs attributes that a stub does not have."""
    try:
        return bool(stub_loss() != MARK)
    except AttributeError:
        return True


def test_a_bug_is_observed_and_stays(declare: Any) -> None:
    declare(is_marked, mark)
    own = vars(DPOTrainer)["dpo_loss"]
    report = trl_hotfix.apply(observe=True)
    assert identity(report) == OBSERVED
    assert report.ok
    assert report["made-up"].evidence["trl.trainer.dpo_trainer"]["red"]["verdict"] == "reproduced"
    assert is_unpatched()
    assert vars(DPOTrainer)["dpo_loss"] is not own
    assert identity(trl_hotfix.revert()) == (State.REVERTED, Reason.BY_REQUEST)
    assert vars(DPOTrainer)["dpo_loss"] is own


def test_nothing_is_on_record_as_repaired(declare: Any) -> None:
    declare(is_marked, mark)
    nothing = trl_hotfix.apply(only=[])
    observed = trl_hotfix.apply(observe=True)
    assert observed.freeze()["patches"] == []
    assert observed.digest == nothing.digest
    assert observed.to_dict()["observe"] is True
    assert "repairing nothing" in str(observed).splitlines()[0]
    assert trl_hotfix.apply(observe=True, dry_run=True)["made-up"].state is State.PENDING
    assert trl_hotfix.apply(observe=True, dry_run=True).digest == nothing.digest
    assert trl_hotfix.apply().digest != nothing.digest


def test_each_instance_is_counted(declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply(observe=True)
    one, other = object.__new__(DPOTrainer), object.__new__(DPOTrainer)
    for trainer in (one, one, other):
        with pytest.raises(AttributeError):
            trainer.dpo_loss(1, 2, 3, 4)
    totals = [witness.ledger_of(trainer).total(*TARGET, observe=True) for trainer in (one, other)]
    assert [(count.called, count.acted) for count in totals] == [(2, 0), (1, 0)]
    assert witness.ledger_of(one).total(*TARGET).called == 0


def test_the_constructor_is_noted_and_not_counted(declare: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply(observe=True)
    trainer = object.__new__(DPOTrainer)
    with pytest.raises(Exception, match=r"."):
        trainer.__init__("a-model", beta=0.5)  # type: ignore[misc]
    noted = given.to(trainer)
    assert noted is not None
    assert noted["model"].value == "a-model"
    assert noted["beta"].value == 0.5
    assert noted["ref_model"].kind.value == "not given"
    assert witness.counts_of(*TARGET).known(trainer) is None
    assert given.to(object.__new__(DPOTrainer)) is None


@pytest.mark.parametrize("module", [pickle, dill], ids=lambda module: module.__name__)
def test_pickles_are_those_of_the_unpatched_function(declare: Any, module: Any) -> None:
    declare(is_marked, mark)
    trainer = object.__new__(DPOTrainer)
    references: list[Callable[[], Any]] = [
        lambda: DPOTrainer.dpo_loss,
        lambda: trainer.dpo_loss,
        lambda: vars(DPOTrainer)["dpo_loss"],
    ]
    before = [module.dumps(reference()) for reference in references]
    trl_hotfix.apply(observe=True)
    assert [module.dumps(reference()) for reference in references] == before
    assert module.loads(before[0]) is DPOTrainer.dpo_loss
    trl_hotfix.apply()
    assert [module.dumps(reference()) for reference in references] != before


@pytest.mark.parametrize("module", [pickle, dill], ids=lambda module: module.__name__)
def test_a_function_that_its_module_imports_by_name_is_pickled_under_the_name_there(declare: Any, module: Any) -> None:
    declare(is_marked, mark, attribute="pad_to_length")
    trl_hotfix.apply(observe=True)
    observed = dpo_trainer.pad_to_length
    assert observed is not utils.pad_to_length
    assert module.loads(module.dumps(observed)) is observed
    assert len(module.dumps(observed)) < 100
    assert observed.__wrapped__ is utils.pad_to_length


def test_observing_and_repairing_follow_each_other(declare: Any) -> None:
    declare(is_marked, mark)
    for _ in range(2):
        assert identity(trl_hotfix.apply(observe=True)) == OBSERVED
        assert is_unpatched()
        assert identity(trl_hotfix.apply()) == APPLIED
        assert not is_unpatched()


def test_the_variable_observes_whatever_the_script_calls(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    monkeypatch.setenv("TRL_HOTFIX", "observe")
    for arguments in ({}, {"strict": True}, {"only": ["made-up"]}):
        assert identity(trl_hotfix.apply(**arguments)) == OBSERVED
    with trl_hotfix.patched("made-up") as report:
        assert identity(report) == OBSERVED
    assert is_unpatched()
    assert identity(trl_hotfix.apply(observe=False)) == APPLIED


@pytest.mark.parametrize(("variable", "strict"), [("", True), ("strict", None)])
def test_observing_under_strict_is_an_error(
    declare: Any, monkeypatch: pytest.MonkeyPatch, variable: str, strict: bool | None
) -> None:
    declare(is_marked, mark)
    monkeypatch.setenv("TRL_HOTFIX", variable)
    before = vars(DPOTrainer)["dpo_loss"]
    with pytest.raises(trl_hotfix.SettingError, match="observe=True repairs nothing"):
        trl_hotfix.apply(observe=True, strict=strict)
    assert vars(DPOTrainer)["dpo_loss"] is before


def test_a_block_repairs_in_a_process_that_observes(declare: Any) -> None:
    declare(is_marked, mark)
    declare(is_marked, mark, id="other-one")
    trl_hotfix.apply(observe=True)
    with trl_hotfix.patched("made-up") as report:
        assert identity(report) == APPLIED
        assert report["other-one"].state is State.DISABLED
        assert not is_unpatched()
    assert identity(trl_hotfix.status()) == identity(trl_hotfix.status(), "other-one") == OBSERVED
    assert is_unpatched()


def test_the_selection_selects_what_is_observed(declare: Any) -> None:
    declare(is_marked, mark)
    declare(is_marked, mark, id="other-one")
    report = trl_hotfix.apply(observe=True, skip=["other-one"])
    assert (identity(report), report["other-one"].reason) == (OBSERVED, Reason.EXCLUDED)


@pytest.mark.parametrize(
    ("self_test", "expected"),
    [
        (lambda module: Outcome(Verdict.FIXED), (State.SKIPPED, Reason.NOT_REPRODUCED)),
        (raises, (State.FAILED, Reason.SELF_TEST_ERROR)),
    ],
)
def test_what_is_not_reproduced_is_not_observed(
    declare: Any, self_test: Any, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declare(self_test, mark)
    assert identity(trl_hotfix.apply(observe=True)) == expected
    assert "made-up (r1) is NOT observed" in caplog.text


def test_what_a_pickle_of_a_patched_process_asks_for_stays_off(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    data = pickle.dumps(vars(DPOTrainer)["dpo_loss"])
    trl_hotfix.revert()
    monkeypatch.setattr(engine, "ENGINE", engine.Engine())
    trl_hotfix.apply(observe=True)
    assert pickle.loads(data) is vars(DPOTrainer)["dpo_loss"]
    assert is_unpatched()
    assert "the patches of a pickled function stay off" in caplog.text
    trl_hotfix.revert()


def test_a_call_that_cannot_be_counted_is_one_warning(
    declare: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply(observe=True)
    monkeypatch.setattr(witness.Doing, "of", lambda *arguments: 1 / 0)
    for _ in range(3):
        assert is_unpatched()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["we no longer observe made-up: we cannot count a call (division by zero)"]
    assert identity(trl_hotfix.status()) == (State.FAILED, Reason.WRAPPER_ERROR)


# Each kind of method, without a patch.


def observing(name: str, owner: type = Trainer) -> Any:
    """Put a layer that observes on an attribute of the sample trainer, and return what it counts by."""
    counting = layer()
    counting.observe = True
    site_of(name, owner).put_on(counting)
    return counting.witnessed


def calls(each: witness.Witnessed) -> int:
    """Return the calls by all objects, and by none."""
    ledgers = [witness.PROCESS, *witness._ledgers.all()]
    return sum(count.called for ledger in ledgers for _, counted, count in ledger.every() if counted is each)


@pytest.mark.usefixtures("sample_trainers_restored")
def test_every_kind_of_method_is_counted_and_as_before() -> None:
    counts = {name: observing(name) for name in ("method", "static", "klass", "coroutine")}
    trainer = Trainer()
    assert trainer.method(3, times=2) == 12
    assert (trainer.static(3), Trainer.static(3)) == (9, 9)
    assert (trainer.klass(3), Trainer.klass(3)) == (6, 6)
    assert asyncio.run(trainer.coroutine(3)) == 3
    assert asyncio.iscoroutinefunction(Trainer.coroutine)
    total = {name: calls(counts[name]) for name in counts}
    assert total == {"method": 1, "static": 2, "klass": 2, "coroutine": 1}
    function = vars(Trainer)["method"]
    assert (function.__module__, function.__qualname__) == (sample_trainers.__name__, "Trainer.method")


@pytest.mark.usefixtures("sample_trainers_restored")
def test_dynamo_compiles_the_method_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    counts = observing("method")
    trainer, tensor = Trainer(), torch.ones(2)
    compiled = torch.compile(lambda x: trainer.method(x) + 1, backend="eager", fullgraph=True)
    assert compiled(tensor).tolist() == [3.0, 3.0]
    # A later patch would have been put on after this code was compiled.
    torch._dynamo.reset()
    assert calls(counts) == 0


def test_arguments_are_described_as_conditions_read_them() -> None:
    class Callback:
        pass

    class Own(Callback):
        pass

    class PeftAdapterMixin:
        pass

    class Model(PeftAdapterMixin):
        pass

    torch = pytest.importorskip("torch")
    assert given.described(torch.bfloat16).value == "bfloat16"
    assert given.described(["a", "b"]).value == ["a", "b"]
    assert any(name.endswith("Callback") for name in given.described([Own()]).made_by)
    assert not any("Peft" in name for name in given.described(Model()).made_by)
    assert given.described(SimpleNamespace()).made_by == ("types.SimpleNamespace",)
