"""Trainers that a patch does not reach: made before it, of a class that is not TRL's, or without a call in a step."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from trl import DPOConfig, SFTConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

import trl_hotfix
from trl_hotfix import witness
from trl_hotfix.model import Called, Hit, Reason, State
from trl_hotfix.patching import engine, reach
from trl_hotfix.testing import trainers as stand_ins
from trl_hotfix.witness import Here, Phase

from helpers.made_up_patches import MARK, is_marked, mark
from helpers.trl_like import NAME, double, doubles

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")

EARLY = list(reach.BEFORE_TRAINING)
ON = (State.APPLIED, Reason.PROVEN, "")


def made(cls: Any = DPOTrainer, **attributes: Any) -> Any:
    """Return a trainer whose constructor has run, as far as anybody can tell."""
    trainer = object.__new__(cls)
    vars(trainer).update({"callback_handler": None, **attributes})
    return trainer


def made_with_it(cls: Any = DPOTrainer, *, called: bool = True, **attributes: Any) -> Any:
    """Return a trainer that was made while the patch was on, and whose constructor has called it, or has not."""
    trainer = made(cls, **attributes)
    doing = witness.ledger_of(trainer).by_phase[Phase.CONSTRUCT]
    for each in witness.standing():
        doing.of(each).called += called
    witness.note_construction(trainer)
    return trainer


def derived(name: str, *bases: type, module: str = "project", **attributes: Any) -> Any:
    return type(name, bases, {"__module__": module, **attributes})


def state_for(trainer: Any) -> tuple[State, Reason, str]:
    """Return the state of the patch for this trainer, and what it is unreached by."""
    status = engine.ENGINE.status([trainer])["made-up"]
    evidence: Any = next(iter(status.evidence.values()), {})
    by = evidence.get("by", "")
    return status.state, status.reason, by


def begin(trainer: Any) -> None:
    witness.ledger_of(trainer).begin_run()


def step(trainer: Any, work: Any = None) -> None:
    """Take a step in which the trainer does ``work``."""
    before, Here.thread.doing = Here.thread.doing, witness.doing(trainer, Phase.STEP)
    try:
        if work is not None:
            work()
    finally:
        Here.thread.doing = before
    ledger = witness.ledger_of(trainer)
    ledger.run.step_ends(ledger)


# Made before the patch


@pytest.mark.parametrize("called", EARLY)
def test_a_trainer_made_before_the_patch_is_named(declare: Any, called: Called) -> None:
    before = made()
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    by = "a trl.trainer.dpo_trainer.DPOTrainer was made before the patch went on"
    assert state_for(before) == (State.UNREACHED, Reason.MADE_BEFORE, by)
    assert state_for(made_with_it()) == ON
    assert state_for(made(**vars(before)))[1] is Reason.MADE_BEFORE
    assert state_for(made(**copy.deepcopy(vars(made_with_it())))) == ON
    # `status()` without objects finds it among all objects of the process.
    assert trl_hotfix.status()["made-up"].reason is Reason.MADE_BEFORE


@pytest.mark.parametrize("called", [None, *(moment for moment in Called if moment not in EARLY)])
def test_a_trainer_is_not_too_old_for_a_patch_of_its_steps(declare: Any, called: Called | None) -> None:
    before = made()
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    assert state_for(before) == ON
    begin(before)
    step(before, lambda: before.dpo_loss(1))
    assert state_for(before) == ON


def test_one_early_target_among_others_is_missed(declare: Any) -> None:
    before = made()
    attributes = "DPOTrainer.compute_loss DPOTrainer.dpo_loss"
    declare(is_marked, mark, attribute=attributes, called=[Called.STEP, Called.CONSTRUCTION])
    trl_hotfix.apply()
    assert state_for(before)[1] is Reason.MADE_BEFORE
    # The other target may still be called.
    before.dpo_loss(1)
    assert state_for(before) == ON


@pytest.mark.usefixtures("no_collection")
def test_a_trainer_that_nobody_holds_any_more_is_not_named(declare: Any) -> None:
    before = made()
    before.itself = before
    del before
    declare(is_marked, mark, called=[EARLY[0]])
    assert trl_hotfix.apply(strict="all")["made-up"].state is State.APPLIED


def test_a_trainer_made_before_that_prepares_its_data_now_is_reached(declare: Any) -> None:
    before = made()
    declare(is_marked, mark, called=[Called.PREPARATION])
    trl_hotfix.apply()
    assert before.dpo_loss(1) == MARK
    assert state_for(before) == ON


def test_a_trainer_of_another_class_is_not_too_old(declare: Any) -> None:
    other = made(SFTTrainer)
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    trl_hotfix.apply()
    assert state_for(other) == ON


def test_a_trainer_that_the_bug_is_said_to_be_one_of_is_too_old_for_a_function(declare: Any, trl_like: Any) -> None:
    hits = (Hit(("SFT",), "a symptom"),)
    before, other = made(SFTTrainer), made()
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, called=[Called.CONSTRUCTION], hits=hits)
    trl_hotfix.apply()
    assert state_for(before)[1] is Reason.MADE_BEFORE
    assert state_for(other) == ON


@pytest.mark.parametrize("called", [moment for moment in EARLY if moment is not Called.CONSTRUCTION])
def test_what_some_constructions_call_is_not_missed_where_it_was_on(declare: Any, called: Called) -> None:
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    assert state_for(made_with_it(called=False)) == ON


def test_a_construction_that_went_past_the_patch_is_named(declare: Any) -> None:
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    trl_hotfix.apply()
    by = "trl.trainer.dpo_trainer.DPOTrainer was made without a call of DPOTrainer.dpo_loss"
    assert state_for(made_with_it(called=False)) == (State.UNREACHED, Reason.NOT_CALLED, by)
    mine = derived("Mine", DPOTrainer, dpo_loss=lambda self, x: 0)
    assert state_for(made_with_it(mine, called=False)) == (State.UNREACHED, Reason.OVERRIDDEN, "project.Mine.dpo_loss")
    assert state_for(made_with_it(mine)) == ON


def test_what_was_only_observed_did_not_repair_a_construction(declare: Any) -> None:
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    trl_hotfix.apply(observe=True)
    observed = made_with_it()
    trl_hotfix.apply()
    assert state_for(observed)[1] is Reason.MADE_BEFORE


# A class that is not TRL's


@pytest.mark.parametrize(
    ("cls", "args"),
    [
        (derived("DPOTrainer", transformers.Trainer), None),
        (derived("Mine", derived("DPOTrainer", transformers.Trainer)), None),
        (derived("Mine", transformers.Trainer), object.__new__(DPOConfig)),
        (derived("Mine", transformers.Trainer), object.__new__(derived("MyConfig", DPOConfig))),
    ],
    ids=["copied", "derived from a copy", "with the config", "with a config of its own"],
)
def test_a_class_that_only_looks_like_that_of_trl_is_named(declare: Any, cls: Any, args: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    by = f"project.{cls.__name__} does not inherit DPOTrainer.dpo_loss"
    assert state_for(made(cls, args=args)) == (State.UNREACHED, Reason.NOT_INHERITED, by)


@pytest.mark.parametrize(
    ("cls", "args"),
    [
        (DPOTrainer, DPOConfig),
        (derived("Mine", DPOTrainer), DPOConfig),
        (SFTTrainer, SFTConfig),
        (derived("Mine", SFTTrainer), DPOConfig),
        (derived("DPOTrainer", transformers.Trainer, module="trl.experimental.dpo"), DPOConfig),
        (derived("Mine", transformers.Trainer), SFTConfig),
    ],
    ids=["TRL's", "derived", "another", "derived from another", "of the same name in TRL", "of nobody"],
)
def test_a_class_of_trl_and_one_of_nobody_are_not_taken_for_a_copy(declare: Any, cls: Any, args: Any) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    assert state_for(made(cls, args=object.__new__(args))) == ON


# A step without a call


@pytest.fixture
def step_patch(declare: Any) -> None:
    declare(is_marked, mark, called=[Called.STEP])
    trl_hotfix.apply()


@pytest.mark.usefixtures("step_patch")
def test_a_step_without_a_call_is_named_once_it_is_taken() -> None:
    trainer = made()
    assert state_for(trainer) == ON
    begin(trainer)
    assert state_for(trainer) == ON
    step(trainer)
    by = "trl.trainer.dpo_trainer.DPOTrainer took a step without a call of DPOTrainer.dpo_loss"
    assert state_for(trainer) == (State.UNREACHED, Reason.NOT_CALLED, by)
    assert state_for(made()) == ON
    trainer.dpo_loss(1)
    assert state_for(trainer)[1] is Reason.NOT_CALLED
    step(trainer, lambda: trainer.dpo_loss(1))
    assert state_for(trainer) == ON


@pytest.mark.parametrize("phase", [Phase.EVALUATE, Phase.TRAIN, Phase.OTHER])
@pytest.mark.usefixtures("step_patch")
def test_what_is_called_outside_of_the_steps_is_no_witness(phase: Phase) -> None:
    """An evaluation in the run, a callback that looks at a batch, another thread."""
    trainer = made()
    begin(trainer)
    Here.thread.doing = witness.doing(trainer, phase)
    trainer.dpo_loss(1)
    step(trainer)
    Here.thread.doing = witness.PROCESS.by_phase[Phase.OTHER]
    assert state_for(trainer)[1] is Reason.NOT_CALLED


@pytest.mark.usefixtures("step_patch")
def test_a_training_step_of_a_users_own_is_seen_in_the_training() -> None:
    trainer = made()
    Here.thread.doing = witness.doing(trainer, Phase.TRAIN)
    begin(trainer)
    trainer.dpo_loss(1)
    ledger = witness.ledger_of(trainer)
    ledger.run.step_ends(ledger)
    Here.thread.doing = witness.PROCESS.by_phase[Phase.OTHER]
    assert state_for(trainer) == ON


@pytest.mark.usefixtures("step_patch")
def test_a_trainer_that_is_a_dataclass_is_looked_at_too() -> None:
    """Such a trainer, as ``trl.experimental.kto.KTOTrainer`` of TRL 1.16.0, cannot be hashed."""
    cls = dataclass(derived("FromDataclass", DPOTrainer, __init__=DPOTrainer.__init__))
    trainer, other = made(cls), made(cls)
    assert trainer == other
    begin(trainer)
    begin(other)
    step(other, lambda: other.dpo_loss(1))
    step(trainer)
    assert (state_for(trainer)[1], state_for(other)) == (Reason.NOT_CALLED, ON)


@pytest.mark.usefixtures("step_patch")
def test_calls_before_the_training_are_none_of_its_steps() -> None:
    """An evaluation before ``train()`` calls the loss too. A second training begins anew."""
    trainer = made()
    trainer.dpo_loss(1)
    for called in (False, True, False):
        begin(trainer)
        step(trainer, (lambda: trainer.dpo_loss(1)) if called else None)
        assert (state_for(trainer)[1] is Reason.NOT_CALLED) is not called


@pytest.mark.usefixtures("step_patch")
def test_a_call_by_another_trainer_is_no_witness() -> None:
    trainer, other = made(), made()
    begin(trainer)
    step(trainer, lambda: other.dpo_loss(1))
    assert state_for(trainer)[1] is Reason.NOT_CALLED
    assert state_for(other) == ON


def test_a_patch_that_goes_on_during_the_training_is_not_asked_about(declare: Any) -> None:
    declare(is_marked, mark, called=[Called.STEP])
    trainer = made()
    begin(trainer)
    step(trainer)
    trl_hotfix.apply()
    assert state_for(trainer) == ON
    step(trainer)


def test_a_traced_target_is_not_asked_about(declare: Any) -> None:
    """The calls of compiled code are not counted."""
    declare(is_marked, mark, called=[Called.STEP], traced=True)
    trl_hotfix.apply()
    trainer = made()
    begin(trainer)
    step(trainer)
    assert state_for(trainer) == ON


@pytest.mark.parametrize("called", [None, *(moment for moment in Called if moment is not Called.STEP)])
def test_only_a_target_of_every_step_must_be_called_in_one(declare: Any, called: Called | None) -> None:
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    trainer = made_with_it()
    begin(trainer)
    step(trainer)
    assert state_for(trainer) == ON


@pytest.mark.parametrize("called", list(Called))
def test_a_function_need_not_be_called_by_a_trainer(declare: Any, trl_like: Any, called: Called) -> None:
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, called=[called])
    trl_hotfix.apply()
    trainer = made_with_it(trl_like.module.MadeUpTrainer)
    begin(trainer)
    step(trainer)
    assert state_for(trainer) == ON


def test_a_trainer_of_trl_with_a_method_of_its_own_need_not_call_the_one_that_it_overrides(
    declare: Any, trl_like: Any
) -> None:
    attribute = "MadeUpTrainer.own_loss"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.STEP])
    trl_hotfix.apply()
    trainer = made(trl_like.module.OverridingTrainer)
    begin(trainer)
    step(trainer)
    assert state_for(trainer) == ON


def test_a_trainer_of_trl_that_the_patch_names_is_asked(declare: Any, trl_like: Any) -> None:
    attribute, hits = "MadeUpTrainer.own_loss", (Hit(("Overriding",), "a symptom"),)
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.STEP], hits=hits)
    trl_hotfix.apply()
    trainer = made(trl_like.module.OverridingTrainer)
    begin(trainer)
    step(trainer)
    assert state_for(trainer)[1] is Reason.OVERRIDDEN


@pytest.mark.usefixtures("step_patch")
def test_a_method_of_the_users_own_is_asked_by_what_it_calls() -> None:
    class Mine(DPOTrainer):  # type: ignore[misc]
        def dpo_loss(self, *args: Any) -> Any:
            return getattr(super(), "dpo_" + "loss")(*args) if len(args) > 1 else 0

    of_the_class, of_the_instance = made(Mine), made()
    of_the_instance.dpo_loss = lambda *args, patched=of_the_instance.dpo_loss: patched(*args) if len(args) > 1 else 0
    for trainer, by in ((of_the_class, "test_reach"), (of_the_instance, "dpo_loss of an instance of")):
        begin(trainer)
        step(trainer, lambda trainer=trainer: trainer.dpo_loss(1))
        state, reason, described = state_for(trainer)
        assert (state, reason) == (State.UNREACHED, Reason.OVERRIDDEN)
        assert by in described
        step(trainer, lambda trainer=trainer: trainer.dpo_loss(1, 2))
        assert state_for(trainer) == ON


@pytest.mark.usefixtures("step_patch")
def test_a_class_that_is_only_defined_is_blamed_on_nobody() -> None:
    unused = derived("Unused", DPOTrainer, dpo_loss=lambda self: 0)
    trainer = made()
    begin(trainer)
    step(trainer, lambda: trainer.dpo_loss(1))
    assert state_for(trainer) == ON
    assert trl_hotfix.status()["made-up"].state is State.APPLIED
    assert unused.__mro__[1] is DPOTrainer


def test_a_copy_of_a_trainer_whose_module_is_not_imported_is_named(declare: Any) -> None:
    declare(is_marked, mark, module="trl.trainer.never_imported", attribute="NeverImportedTrainer.loss")
    trl_hotfix.apply()
    copied = derived("NeverImportedTrainer", transformers.Trainer)
    assert state_for(made(copied))[:2] == (State.UNREACHED, Reason.NOT_INHERITED)
    assert state_for(made(derived("Mine", transformers.Trainer)))[0] is State.PENDING


def test_a_copy_may_keep_the_private_base_of_trls_trainers(declare: Any) -> None:
    base = derived("_BaseTrainer", transformers.Trainer, module="trl.trainer.base_trainer")
    declare(is_marked, mark)
    trl_hotfix.apply()
    assert state_for(made(derived("DPOTrainer", base)))[1] is Reason.NOT_INHERITED


# The trainers of this process


def test_a_trainer_is_one_whose_constructor_has_run_and_no_stand_in() -> None:
    unfinished, stand_in = object.__new__(DPOTrainer), made(derived("A", DPOTrainer, module=stand_ins.__name__))
    trainer, of_transformers = made(), made(transformers.Trainer)
    everyone = reach.all_trainers()
    assert all(any(one is other for other in everyone) for one in (trainer, of_transformers))
    assert not any(one is other for other in everyone for one in (unfinished, stand_in))
    assert not reach.is_trainer(SimpleNamespace(callback_handler=None))


def test_a_stand_in_of_a_self_test_is_not_missed(declare: Any) -> None:
    before = made(derived("A", DPOTrainer, module=stand_ins.__name__))
    of_the_patch = made(derived("A", DPOTrainer, module="trl_hotfix.patches.made_up"))
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    trl_hotfix.apply()
    assert state_for(before) == ON
    assert state_for(of_the_patch) == ON


def test_without_transformers_there_are_no_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made()
    monkeypatch.delitem(sys.modules, "transformers.trainer")
    assert reach.all_trainers() == []
    assert not reach.is_trainer(trainer)


# The patches that a trainer has to do with


def test_a_patch_concerns_the_trainers_that_call_it(declare: Any, trl_like: Any) -> None:
    attribute, hits = "MadeUpTrainer.own_loss", (Hit(("Overriding",), "a symptom"),)
    declare(is_marked, mark)
    declare(doubles(attribute), double, id="own", attribute=attribute, module=NAME, hits=hits)
    declare(doubles("scaled"), double, id="of-dpo", attribute="scaled", module=NAME, hits=(Hit(("DPO",), "a"),))
    declare(doubles("scaled_too"), double, id="of-all", attribute="scaled_too", module=NAME, hits=(Hit(("*",), "a"),))
    declare(is_marked, mark, id="elsewhere", trl="<0.10")
    trl_hotfix.apply()

    def concerning(trainer: Any) -> set[str]:
        return reach.concerning(engine.ENGINE.module_patches(), trainer)

    assert concerning(made()) == {"made-up", "of-dpo", "of-all"}
    assert concerning(made(derived("Mine", DPOTrainer))) == {"made-up", "of-dpo", "of-all"}
    assert concerning(made(SFTTrainer)) == {"of-all"}
    assert concerning(made(trl_like.module.MadeUpTrainer)) == {"own", "of-all"}
    assert concerning(made(trl_like.module.OverridingTrainer)) == {"own", "of-all"}
    assert concerning(made(transformers.Trainer)) == set()
    assert concerning(None) == {"made-up", "own", "of-dpo", "of-all"}
