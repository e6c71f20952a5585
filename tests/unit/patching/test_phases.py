"""Layers say what a trainer does while patches are on, and note what it is made with. TRL's methods come back."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import transformers
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, State, Verdict
from trl_hotfix.patching import given, phases
from trl_hotfix.patching.inheritance import site_of
from trl_hotfix.witness import PROCESS, Here, Phase, doing

from helpers.made_up_patches import is_marked, mark, pass_through
from helpers.trl_like import NAME, double, doubles

SFT = "trl.trainer.sft_trainer"

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def made(**arguments: Any) -> Any:
    """Return what was noted of a trainer whose constructor fails."""
    trainer = object.__new__(DPOTrainer)
    with pytest.raises(Exception, match=r"."):
        trainer.__init__("a-model", **arguments)  # type: ignore[misc]
    return given.to(trainer)


def test_a_trainer_of_a_repaired_class_is_noted(declare: Any) -> None:
    declare(is_marked, mark)
    own, signature = vars(DPOTrainer)["__init__"], inspect.signature(DPOTrainer)
    assert made() is None
    trl_hotfix.apply()
    noted = made(beta=0.5)
    assert (noted["model"].value, noted["beta"].value) == ("a-model", 0.5)
    assert noted["peft_config"].kind.value == "not given"
    assert inspect.signature(DPOTrainer) == signature
    assert inspect.unwrap(DPOTrainer.__init__) is inspect.unwrap(own)
    assert DPOTrainer.__init__.__qualname__ == own.__qualname__
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is own
    assert made() is None


class WithoutTextError(Exception):
    """An error of other code, whose text cannot be made either."""

    def __str__(self) -> str:
        raise RuntimeError


class Callbacks(list[Any]):
    def __len__(self) -> int:
        raise WithoutTextError


def test_an_argument_that_cannot_be_described_leaves_the_constructor_alone(
    declare: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(is_marked, mark)
    given_to: list[Any] = []
    monkeypatch.setattr(DPOTrainer, "__init__", lambda self, callbacks: given_to.append(callbacks))
    trl_hotfix.apply()
    callbacks = Callbacks()
    DPOTrainer(callbacks)
    assert given_to == [callbacks]
    noted = "we cannot note what a trainer is made with (WithoutTextError: its text cannot be made)"
    assert noted in caplog.messages


def during(name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the phases, and the trainers, that this thread is in beneath a method of the trainer's class."""
    seen: list[Any] = []

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        doing = Here.thread.doing
        seen.append((doing.phase, doing.key == id(self)))

    monkeypatch.setattr(transformers.Trainer, name, note)
    return seen


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("train", Phase.TRAIN),
        ("training_step", Phase.STEP),
        ("evaluate", Phase.EVALUATE),
        ("predict", Phase.EVALUATE),
    ],
)
def test_what_a_trainer_does_is_known_beneath_its_method(
    declare: Any, monkeypatch: pytest.MonkeyPatch, name: str, phase: Phase
) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    seen = during(name, monkeypatch)
    trainer, other = object.__new__(DPOTrainer), object.__new__(DPOTrainer)
    getattr(trainer, name)()
    assert seen == [(phase, True)]
    assert Here.thread.doing is PROCESS.by_phase[Phase.OTHER]
    # One within another, in this thread and in another one.
    Here.thread.doing = doing(other, Phase.STEP)
    thread = threading.Thread(target=lambda: seen.append(Here.thread.doing.phase))
    thread.start()
    thread.join(60)
    getattr(trainer, name)()
    assert seen[1:] == [Phase.OTHER, (phase, True)]
    assert Here.thread.doing is doing(other, Phase.STEP)
    Here.thread.doing = PROCESS.by_phase[Phase.OTHER]


def test_an_error_ends_the_phase(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    trl_hotfix.apply()
    monkeypatch.setattr(transformers.Trainer, "train", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        object.__new__(DPOTrainer).train()
    assert Here.thread.doing is PROCESS.by_phase[Phase.OTHER]


def test_a_base_of_trl_has_the_layer_for_its_subclasses(declare: Any, trl_like: Any) -> None:
    declare(doubles("MadeUpTrainer.own_loss"), double, attribute="MadeUpTrainer.own_loss", module=NAME)
    trl_hotfix.apply()
    assert "train" in vars(trl_like.module.MadeUpTrainer)
    assert not {*phases.METHODS} & {*vars(trl_like.module.OverridingTrainer)}
    trl_hotfix.revert()
    assert {*phases.METHODS} & {*vars(trl_like.module.MadeUpTrainer)} == {"__init__"}


def test_the_layers_come_after_the_patches_of_modules_that_were_imported_before(declare: Any) -> None:
    own: list[bool] = []

    def notes_whose_step_it_is(module: Any) -> Outcome:
        own.append("predict" in vars(SFTTrainer))
        return Outcome(Verdict.REPRODUCED if len(own) == 1 else Verdict.FIXED, {})

    declare(is_marked, mark)
    declare(notes_whose_step_it_is, pass_through, id="made-up-2", attribute="SFTTrainer.train", module=SFT)
    trl_hotfix.apply()
    assert own == [False, False]
    assert "predict" in vars(SFTTrainer)


def test_the_layer_is_the_outermost(declare: Any) -> None:
    declare(is_marked, mark)
    verdicts = iter([Verdict.REPRODUCED, Verdict.FIXED])
    trl_hotfix.apply(only=["made-up"])
    declare(lambda module: Outcome(next(verdicts)), pass_through, id="other-one", attribute="DPOTrainer.__init__")
    trl_hotfix.apply()
    site = site_of(vars(DPOTrainer)["__init__"])
    assert [layer.patch_id for layer in site.layers] == ["other-one", phases.LAYER]


def test_a_method_that_other_code_has_put_on_before_is_no_target_because_of_the_layer(declare: Any) -> None:
    declare(is_marked, mark)
    own = DPOTrainer.__init__

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)

    DPOTrainer.__init__ = theirs
    trl_hotfix.apply(only=["made-up"])
    declare(lambda module: Outcome(Verdict.REPRODUCED), pass_through, id="other-one", attribute="DPOTrainer.__init__")
    assert trl_hotfix.apply()["other-one"].state is State.CONFLICTED
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is theirs
    DPOTrainer.__init__ = own


def test_the_constructor_comes_back_with_the_last_patch_of_its_class(declare: Any) -> None:
    declare(is_marked, mark)
    verdicts = iter([Verdict.REPRODUCED, Verdict.FIXED])
    other = {"id": "other-one", "attribute": "DPOTrainer.get_batch_samples"}
    declare(lambda module: Outcome(next(verdicts)), pass_through, **other)
    own = vars(DPOTrainer)["__init__"]
    trl_hotfix.apply()
    trl_hotfix.revert("made-up")
    assert vars(DPOTrainer)["__init__"] is not own
    trl_hotfix.revert("other-one")
    assert vars(DPOTrainer)["__init__"] is own


def test_the_constructor_comes_back_at_the_end_of_a_block(declare: Any) -> None:
    declare(is_marked, mark)
    own = vars(DPOTrainer)["__init__"]
    with trl_hotfix.patched("made-up"):
        assert made() is not None
    assert vars(DPOTrainer)["__init__"] is own


def test_what_other_code_has_put_on_top_stays(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(is_marked, mark)
    own = vars(DPOTrainer)["__init__"]
    trl_hotfix.apply()
    ours = vars(DPOTrainer)["__init__"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    DPOTrainer.__init__ = theirs
    assert trl_hotfix.status()["made-up"].state.value == "applied"
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is theirs
    DPOTrainer.__init__ = ours
    trl_hotfix.apply()
    trl_hotfix.revert()
    assert vars(DPOTrainer)["__init__"] is own


def test_a_list_that_may_be_a_dataset_is_not_looked_into() -> None:
    rows = given.described([{"prompt": "x"}] * (given.LONGEST_LIST + 1))
    assert (rows.made_by, rows.complete) == (("builtins.list",), False)
    circle: list[Any] = []
    circle.append(circle)
    assert given.described(circle).made_by == ("builtins.list",)
