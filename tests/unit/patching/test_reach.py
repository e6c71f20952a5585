"""Trainers that a patch does not reach: made before it, of a class that is not TRL's, or without a call in a step."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from helpers.made_up_patches import MARK, is_marked, mark
from helpers.trl_like import NAME, double, doubles
from trl import DPOConfig, SFTConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

import trl_hotfix
from trl_hotfix.model import Called, Hit, Reason, State
from trl_hotfix.patching import engine, reach
from trl_hotfix.testing import trainers as stand_ins

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")

EARLY = list(reach.BEFORE_TRAINING)
ON = (State.APPLIED, Reason.PROVEN, "")


def made(cls: Any = DPOTrainer, **attributes: Any) -> Any:
    """Return a trainer whose constructor has run, as far as anybody can tell."""
    trainer = object.__new__(cls)
    vars(trainer).update(callback_handler=None, **attributes)
    return trainer


def derived(name: str, *bases: type, module: str = "project", **attributes: Any) -> Any:
    return type(name, bases, {"__module__": module, **attributes})


def state_for(trainer: Any) -> tuple[State, Reason, str]:
    """Return the state of the patch for this trainer, and what it is unreached by."""
    status = engine.ENGINE.status([trainer])["made-up"]
    by = next(iter(status.evidence.values())).get("by", "")
    return status.state, status.reason, by


def begin(trainer: Any) -> None:
    reach.training_begins(trainer, engine.ENGINE.module_patches())


# Made before the patch


@pytest.mark.parametrize("called", EARLY)
def test_a_trainer_made_before_the_patch_is_named(declare: Any, called: Called) -> None:
    before = made()
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    by = "a trl.trainer.dpo_trainer.DPOTrainer was made before the patch went on"
    assert state_for(before) == (State.UNREACHED, Reason.MADE_BEFORE, by)
    assert state_for(made()) == ON
    # `status()` without objects finds it among all objects of the process.
    assert trl_hotfix.status()["made-up"].reason is Reason.MADE_BEFORE


@pytest.mark.parametrize("called", [None, *(moment for moment in Called if moment not in EARLY)])
def test_a_trainer_is_not_too_old_for_a_patch_of_its_steps(declare: Any, called: Called | None) -> None:
    before = made()
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    assert state_for(before) == ON
    begin(before)
    before.dpo_loss(1)
    reach.step_taken(before)
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
    assert trl_hotfix.apply(strict=True)["made-up"].state is State.APPLIED


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


def test_a_trainer_made_before_is_held_weakly_and_no_longer_named(declare: Any) -> None:
    before = made()
    declare(is_marked, mark, called=[Called.CONSTRUCTION])
    trl_hotfix.apply()
    (module_patch,) = engine.ENGINE.module_patches()
    assert [reference() for reference in module_patch.made_before] == [before]
    del before
    gc.collect()
    assert [reference() for reference in module_patch.made_before] == [None]
    assert trl_hotfix.status()["made-up"].state is State.APPLIED


def test_nothing_is_searched_where_no_target_is_early(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[None] = []
    monkeypatch.setattr(reach, "all_trainers", lambda: searches.append(None) or [])
    declare(is_marked, mark, called=[Called.STEP])
    trl_hotfix.apply(strict=True)
    (module_patch,) = engine.ENGINE.module_patches()
    reach.note_trainers_made_before(module_patch, module_patch.sites)
    assert module_patch.made_before == []
    assert searches == []


def test_all_patches_of_a_call_share_one_search(declare: Any, trl_like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, searches, early = made(), [], [Called.CONSTRUCTION]
    monkeypatch.setattr(reach, "all_trainers", lambda: searches.append(None) or [before])
    hits = (Hit(("DPO",), "a symptom"),)
    declare(is_marked, mark, called=early)
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, called=early, hits=hits, id="another")
    trl_hotfix.apply()
    module_patches = engine.ENGINE.module_patches()
    assert [module_patch.decision.state for module_patch in module_patches] == [State.APPLIED] * 2
    assert [[reference() for reference in module_patch.made_before] for module_patch in module_patches] == [
        [before]
    ] * 2
    assert searches == [None]


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
    reach.step_taken(trainer)
    by = "trl.trainer.dpo_trainer.DPOTrainer took a step without a call of DPOTrainer.dpo_loss"
    assert state_for(trainer) == (State.UNREACHED, Reason.NOT_CALLED, by)
    assert state_for(made()) == ON
    trainer.dpo_loss(1)
    assert state_for(trainer) == ON


@pytest.mark.usefixtures("step_patch")
def test_a_trainer_that_is_a_dataclass_is_looked_at_too() -> None:
    """Such a trainer, as ``trl.experimental.kto.KTOTrainer`` of TRL 1.16.0, cannot be hashed."""
    cls = dataclass(derived("FromDataclass", DPOTrainer, __init__=DPOTrainer.__init__))
    trainer, other = made(cls), made(cls)
    assert trainer == other
    begin(trainer)
    begin(other)
    other.dpo_loss(1)
    for taken in (trainer, other):
        reach.step_taken(taken)
    assert (state_for(trainer)[1], state_for(other)) == (Reason.NOT_CALLED, ON)


@pytest.mark.usefixtures("step_patch")
def test_calls_before_the_training_are_none_of_its_steps() -> None:
    """An evaluation before ``train()`` calls the loss too. A second training begins anew."""
    trainer = made()
    trainer.dpo_loss(1)
    for called in (False, True, False):
        begin(trainer)
        if called:
            trainer.dpo_loss(1)
        reach.step_taken(trainer)
        assert (state_for(trainer)[1] is Reason.NOT_CALLED) is not called


@pytest.mark.usefixtures("step_patch")
def test_a_call_by_another_trainer_is_no_witness() -> None:
    trainer, other = made(), made()
    begin(trainer)
    other.dpo_loss(1)
    reach.step_taken(trainer)
    reach.step_taken(other)  # its training has not begun
    assert state_for(trainer)[1] is Reason.NOT_CALLED
    assert state_for(other) == ON


def test_a_patch_that_goes_on_during_the_training_is_not_asked_about(declare: Any) -> None:
    declare(is_marked, mark, called=[Called.STEP])
    trainer = made()
    begin(trainer)
    reach.step_taken(trainer)
    trl_hotfix.apply()
    assert state_for(trainer) == ON


def test_a_traced_target_is_not_asked_about(declare: Any) -> None:
    """The calls of compiled code are not counted."""
    declare(is_marked, mark, called=[Called.STEP], traced=True)
    trl_hotfix.apply()
    trainer = made()
    begin(trainer)
    reach.step_taken(trainer)
    assert state_for(trainer) == ON


@pytest.mark.parametrize("called", [None, *(moment for moment in Called if moment is not Called.STEP)])
def test_only_a_target_of_every_step_must_be_called_in_one(declare: Any, called: Called | None) -> None:
    declare(is_marked, mark, called=[called])
    trl_hotfix.apply()
    trainer = made()
    begin(trainer)
    reach.step_taken(trainer)
    assert state_for(trainer) == ON


@pytest.mark.parametrize("called", list(Called))
def test_a_function_need_not_be_called_by_a_trainer(declare: Any, trl_like: Any, called: Called) -> None:
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, called=[called])
    trl_hotfix.apply()
    trainer = made(trl_like.module.MadeUpTrainer)
    begin(trainer)
    reach.step_taken(trainer)
    assert state_for(trainer) == ON


def test_a_trainer_of_trl_with_a_method_of_its_own_need_not_call_the_one_that_it_overrides(
    declare: Any, trl_like: Any
) -> None:
    attribute = "MadeUpTrainer.own_loss"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.STEP])
    trl_hotfix.apply()
    trainer = made(trl_like.module.OverridingTrainer)
    begin(trainer)
    reach.step_taken(trainer)
    assert state_for(trainer) == ON


@pytest.mark.usefixtures("step_patch")
def test_an_override_that_calls_the_method_at_times_is_not_asked_about() -> None:
    class Mine(DPOTrainer):  # type: ignore[misc]
        def dpo_loss(self, *args: Any) -> Any:
            return super().dpo_loss(*args) if len(args) > 1 else 0

    of_the_class, of_the_instance = made(Mine), made()
    of_the_instance.dpo_loss = lambda *args, patched=of_the_instance.dpo_loss: patched(*args) if len(args) > 1 else 0
    for trainer in (of_the_class, of_the_instance):
        begin(trainer)
        assert trainer.dpo_loss(1) == 0
        reach.step_taken(trainer)
        assert state_for(trainer) == ON


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
    assert concerning(made(trl_like.module.OverridingTrainer)) == {"of-all"}
    assert concerning(made(transformers.Trainer)) == set()
    assert concerning(None) == {"made-up", "own", "of-dpo", "of-all"}
