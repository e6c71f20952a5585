"""Whether a run was resumed: asked of a real trainer of TRL when it begins to train, and again at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from trl_hotfix import api
from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.model import Hit, Outcome, Verdict
from trl_hotfix.recording import beginnings
from trl_hotfix.recording.callback import HotfixCallback
from trl_hotfix.recording.trackers import FILE
from trl_hotfix.recording.trainer_arguments import TrainerArguments
from trl_hotfix.recording.trainer_facts import TrainerFacts

from helpers import real_trainers
from helpers.made_up_patches import pass_through

pytestmark = pytest.mark.usefixtures("fresh_engine")
RESUMED = "train.resume_from_checkpoint"


@pytest.fixture(autouse=True)
def _random_states_of_old_releases_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a newer torch than that of this transformers read the random states of a checkpoint."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


class Asking(TrainerCallback):  # type: ignore[misc]
    """Asks the trainer at each end, when the state is that of any run."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.trainer: Any = None

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        self.answers.append(TrainerArguments(self.trainer).find(RESUMED).value)

    on_train_end = on_train_begin


def real_trainer(folder: Path, **settings: Any) -> Any:
    """Return a DPOTrainer that saves each step, and what it is asked."""
    asking = Asking()
    usual = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = real_trainers.dpo(folder, settings={**usual, **settings})
    for callback in (HotfixCallback(), asking):
        trainer.add_callback(callback)
    asking.trainer = trainer
    return trainer, asking.answers


def test_a_run_that_is_not_resumed_says_so_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    trainer, answers = real_trainer(tmp_path)
    trainer.train()
    assert answers == [None, None]
    assert trainer.state.global_step == 2
    assert TrainerArguments(trainer).find(RESUMED).kind is Kind.UNSET


def test_a_resumed_run_says_so_at_the_beginning_and_at_the_end(tmp_path: Path) -> None:
    real_trainer(tmp_path)[0].train()
    trainer, answers = real_trainer(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert answers == [True, True]
    # A second training of the same trainer counts anew.
    trainer.train()
    assert answers == [True, True, None, None]
    trainer.train(resume_from_checkpoint=True)
    assert answers[-2:] == [True, True]


def test_a_trainer_whose_beginning_was_not_seen_cannot_tell(tmp_path: Path) -> None:
    trainer, _ = real_trainer(tmp_path)
    for name in (RESUMED, "train.other"):
        found = TrainerArguments(trainer).find(name)
        assert (found.kind, found.reason) == (Kind.UNKNOWN, "the beginning of training was not seen")
    trainer.evaluate(trainer.train_dataset)
    # An evaluation is no training.
    assert TrainerArguments(trainer).find(RESUMED).kind is Kind.UNKNOWN
    assert TrainerFacts(trainer).find("epochs_before").reason == "the beginning of training was not seen"


def test_a_resumed_run_hits_the_bugs_of_resumed_runs_alone(tmp_path: Path, declare: Any) -> None:
    hits = (
        Hit(("DPO",), "wrong", {RESUMED: "set"}, "the run is resumed after its first epoch", {"epochs_before": ">=1"}),
    )
    verdicts = iter([Verdict.REPRODUCED, Verdict.FIXED])
    declare(lambda module: Outcome(next(verdicts)), pass_through, hits=hits)
    api.apply()

    def answers(**how: Any) -> list[Any]:
        trainer, _ = real_trainer(tmp_path, max_steps=how.pop("steps"), num_train_epochs=5)
        trainer.train(**how)
        record = json.loads((tmp_path / FILE).read_text())
        return [(one["answer"], one["because"]) for one in record.get("hits", ())]

    # An epoch has four steps.
    assert answers(steps=3) == []
    assert answers(steps=5, resume_from_checkpoint=str(tmp_path / "checkpoint-3")) == []
    because = [f"{RESUMED}=True", "epochs_before=1 (state)"]
    assert answers(steps=6, resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == [("hit", because)]


def test_a_state_without_an_epoch_is_at_its_beginning(tmp_path: Path, trl_like: Any) -> None:
    trainer = trl_like.trainer(tmp_path)
    beginnings.note(trainer, TrainerState(global_step=3, epoch=None))
    assert beginnings.of(trainer) == beginnings.Beginning(3, 0.0)
    assert TrainerFacts(trainer).find("synchronized").reason.endswith("it cannot be asked for (AttributeError)")
    for steps, expected in ((3, True), (4, False)):
        trainer.args.ref_model_sync_steps = steps
        assert TrainerFacts(trainer).find("synchronized").value is expected
