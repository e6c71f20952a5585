"""The section in the model card of a run, for both ways in which TRL writes a card."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix import witness
from trl_hotfix.patching import reach
from trl_hotfix.recording.model_cards import write_into_model_cards

from helpers.made_up_patches import is_marked, mark
from helpers.sample_trainers import new_module

HEAD = "### TRL repaired at run time"
WRITES_ITS_CARD = """
from pathlib import Path

class Trainer:
    main_process = writes_a_card = True

    def is_world_process_zero(self):
        return self.main_process

    def create_model_card(self):
        if self.writes_a_card:
            Path(self.args.output_dir, "README.md").write_text("# A model\\n", encoding="utf-8")
        return "the result"
"""
GENERATES_A_CARD = """
from types import SimpleNamespace

def generate_model_card(**fields):
    return SimpleNamespace(text="# A model\\n", **fields)
"""


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a trainer that writes its card itself, as those of TRL up to 0.11 do."""
    new_module(monkeypatch, "trl.trainer.utils", "")
    module: Any = new_module(monkeypatch, "trl.made_up_trainer", WRITES_ITS_CARD)
    trainer = type("OwnTrainer", (module.Trainer,), {"__module__": "train"})()
    trainer.args = SimpleNamespace(output_dir=str(tmp_path))
    return trainer


@pytest.fixture
def applied(declare: Any) -> None:
    declare(is_marked, mark)
    declare(is_marked, mark, id="elsewhere", trl="<0.10")
    trl_hotfix.apply()


@pytest.mark.usefixtures("applied")
def test_the_section_says_what_each_patch_was_to_the_run(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "concerning", lambda module_patches, trainer: {"made-up"})
    each = witness.witnessed("made-up", "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss", 1)
    witness.elsewhere(trainer).of(each).called = 3
    for _ in range(2):  # a run of the callback for each call of train()
        write_into_model_cards(trainer)
    assert trainer.create_model_card() == "the result"
    report = trl_hotfix.status()
    assert (tmp_path / "README.md").read_text(encoding="utf-8").splitlines() == [
        *("# A model", "", HEAD, ""),
        f"TRL {report.trl}, trl_hotfix {report.trl_hotfix}, digest `{report.digest}`:",
        *("", "- `made-up` (revision 1): called 3 times, nothing to do"),
    ]


@pytest.mark.usefixtures("applied")
def test_a_generated_card_has_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = new_module(monkeypatch, "trl.trainer.utils", GENERATES_A_CARD)
    write_into_model_cards(object())
    card = module.generate_model_card(model_name="a model")
    assert card.model_name == "a model"
    assert card.text.startswith(f"# A model\n\n{HEAD}\n")
    assert "- `made-up` (revision 1): on, and not called\n" in card.text


@pytest.mark.usefixtures("applied")
def test_reverting_everything_takes_the_section_away_too(trainer: Any, tmp_path: Path) -> None:
    before = dict(vars(type(trainer).__mro__[1]))
    write_into_model_cards(trainer)
    trl_hotfix.revert("made-up")
    assert dict(vars(type(trainer).__mro__[1])) != before
    trl_hotfix.revert()
    assert dict(vars(type(trainer).__mro__[1])) == before
    trainer.create_model_card()
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "# A model\n"


@pytest.mark.usefixtures("fresh_engine")
def test_without_patches_the_card_is_that_of_trl(trainer: Any, tmp_path: Path) -> None:
    write_into_model_cards(trainer)
    trainer.create_model_card()
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "# A model\n"


@pytest.mark.usefixtures("applied")
def test_only_the_main_process_changes_the_card(trainer: Any, tmp_path: Path) -> None:
    write_into_model_cards(trainer)
    trainer.main_process = False
    trainer.create_model_card()
    assert HEAD not in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("applied")
def test_a_card_that_was_not_written_is_a_warning(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    write_into_model_cards(trainer)
    trainer.writes_a_card = False
    assert trainer.create_model_card() == "the result"
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "nothing is in the model card (FileNotFoundError" in warning


def test_a_trainer_that_is_not_of_trl_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    new_module(monkeypatch, "trl.trainer.utils", "")
    module: Any = new_module(monkeypatch, "made_up_trainer", WRITES_ITS_CARD)
    before = module.Trainer.create_model_card
    write_into_model_cards(module.Trainer())
    assert module.Trainer.create_model_card is before
