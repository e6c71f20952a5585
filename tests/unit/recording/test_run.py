"""What each patch was to a run: a word and its counts, in the record and in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.made_up_patches import WORDS, is_marked, mark, returns_the_option, use_the_option
from helpers.trl_like import NAME, double, doubles

import trl_hotfix
from trl_hotfix.model import Called, Hit
from trl_hotfix.patching import engine
from trl_hotfix.recording import run
from trl_hotfix.recording.run import Word
from trl_hotfix.selection import freeze_files

OWN_LOSS = "MadeUpTrainer.own_loss"


@pytest.fixture
def made(trl_like: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a trainer whose constructor has run."""
    monkeypatch.setattr(run, "_before", {})

    def make(cls: Any = None) -> Any:
        trainer = object.__new__(cls or trl_like.module.MadeUpTrainer)
        trainer.callback_handler = None
        return trainer

    return make


def at_most(number: int) -> Any:
    """A wrapper that acts on smaller numbers only."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        return result * 2 if args[0] <= number else result

    return wrapper


def repairs_of(trainer: Any) -> dict[str, tuple[Word, int, int]]:
    found = run.repairs(trainer, engine.ENGINE.status([trainer] if trainer is not None else None))
    return {repair.status.id: (repair.word, repair.called, repair.acted) for repair in found}


def record_of(trainer: Any) -> Any:
    return run.record(trainer, engine.ENGINE.status([trainer]))


def lines_of(trainer: Any) -> list[str]:
    return [repair.line() for repair in run.repairs(trainer, engine.ENGINE.status([trainer]))]


def test_a_patch_is_standing_by_then_called_then_repaired(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), at_most(1), attribute=OWN_LOSS, module=NAME)
    declare(is_marked, mark, id="of-others")
    declare(is_marked, mark, id="elsewhere", trl="<0.10")
    trl_hotfix.apply()
    trainer, other = made(), made()
    of_others = {"of-others": (Word.SELECTED, 0, 0)}
    assert repairs_of(trainer) == {"made-up": (Word.STANDING_BY, 0, 0), **of_others}
    assert lines_of(trainer)[0] == "made-up (r1) was not called: the run did not need it"
    trainer.own_loss(2)
    assert repairs_of(trainer) == {"made-up": (Word.CALLED, 1, 0), **of_others}
    assert lines_of(trainer)[0] == "made-up (r1) was called once, with nothing to do"
    trainer.own_loss(2)
    assert lines_of(trainer)[0] == "made-up (r1) was called 2 times, with nothing to do"
    trainer.own_loss(1)
    assert repairs_of(trainer) == {"made-up": (Word.REPAIRED, 3, 1), **of_others}
    assert lines_of(trainer)[0] == "made-up (r1) acted in 1 of 3 calls"
    assert repairs_of(other) == {"made-up": (Word.STANDING_BY, 0, 0), **of_others}


def test_a_constructor_that_overrides_and_calls_the_patched_one_is_concerned(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    trl_hotfix.apply()

    class Mine(type(made())):  # type: ignore[misc]
        def own_loss(self, loss: Any) -> Any:
            return super().own_loss(loss)

    trainer = made(Mine)
    assert repairs_of(trainer) == {"made-up": (Word.SELECTED, 0, 0)}
    trainer.own_loss(1)
    assert repairs_of(trainer) == {"made-up": (Word.REPAIRED, 1, 1)}


def test_the_calls_of_a_function_are_those_since_the_last_run(declare: Any, made: Any, trl_like: Any) -> None:
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, hits=(Hit(("*",), "a symptom"),))
    trl_hotfix.apply()
    assert repairs_of(made())["made-up"] == (Word.STANDING_BY, 0, 0)
    trl_like.module.scaled(1)
    trl_like.module.scaled(1)
    assert repairs_of(made())["made-up"] == (Word.REPAIRED, 2, 2)
    run.run_ends()
    assert repairs_of(made())["made-up"] == (Word.STANDING_BY, 0, 0)
    trl_like.module.scaled(1)
    assert repairs_of(made())["made-up"] == (Word.REPAIRED, 1, 1)


def test_the_counts_of_all_targets_of_a_patch_are_added(declare: Any, made: Any, trl_like: Any) -> None:
    attributes = f"{OWN_LOSS} MadeUpTrainer.evaluated scaled"
    declare(doubles(OWN_LOSS), at_most(1), attribute=attributes, module=NAME)
    trl_hotfix.apply()
    trainer = made()
    trainer.own_loss(1)
    trainer.evaluated(5)
    trl_like.module.scaled(1)
    assert repairs_of(trainer)["made-up"] == (Word.REPAIRED, 3, 2)


def test_without_a_trainer_all_patches_are_concerned(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    declare(is_marked, mark, id="another")
    trl_hotfix.apply()
    assert {word for word, *_ in repairs_of(None).values()} == {Word.STANDING_BY}


# What is taken off


EARLY = {"construction", "some constructions", "preparation"}


@pytest.mark.parametrize("called", list(Called))
def test_what_a_trainer_was_made_with_stays_in_its_run_after_revert(declare: Any, made: Any, called: Called) -> None:
    stays = called.value in EARLY
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[called])
    trl_hotfix.apply()
    trainer, unused = made(), made()
    trainer.own_loss(1)
    trl_hotfix.revert()
    assert repairs_of(unused) == {}
    assert "reverted" not in record_of(unused)
    record = record_of(trainer)
    assert record["patches"] == []
    assert bool(repairs_of(trainer)) is stays
    entry = {"id": "made-up", "revision": 1, "options": {}, "word": "repaired", "called": 1, "acted": 1}
    assert record.get("reverted") == ([entry] if stays else None)


def test_what_was_called_and_did_nothing_does_not_stay_after_revert(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), at_most(1), attribute=OWN_LOSS, module=NAME, called=[Called.CONSTRUCTION])
    trl_hotfix.apply()
    trainer = made()
    trainer.own_loss(2)
    trl_hotfix.revert()
    assert repairs_of(trainer) == {}


# The record


def test_the_record_keeps_apart_what_did_not_reach_the_run(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[Called.CONSTRUCTION])
    declare(returns_the_option, use_the_option, id="with-options", options=WORDS)
    before = made()
    trl_hotfix.apply(options={"with-options": {"word": "no"}})
    record = record_of(before)
    assert record["schema"] == freeze_files.SCHEMA == 2
    assert record["patches"] == [
        {"id": "with-options", "revision": 1, "options": {"word": "no"}, "word": "selected", "called": 0, "acted": 0}
    ]
    assert record["unreached"] == [{"id": "made-up", "revision": 1, "options": {}, "reason": "made-before"}]
    assert "reverted" not in record
    assert "observed" not in record
    assert record_of(made()).keys() == {"schema", "trl_hotfix", "trl", "digest", "patches"}


def test_the_record_of_a_run_selects_the_same_patches(declare: Any, made: Any, tmp_path: Path) -> None:
    """The digest is that of the set, and the words and counts are no part of it."""
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    declare(is_marked, mark, id="left-out")
    report = trl_hotfix.apply(skip=["left-out"])
    trainer = made()
    trainer.own_loss(1)
    path = tmp_path / "trl_hotfix.json"
    path.write_text(json.dumps(record_of(trainer)))
    trl_hotfix.revert()
    again = trl_hotfix.apply(only=f"@{path}")
    assert [status.id for status in again.on()] == ["made-up"]
    assert record_of(trainer)["digest"] == report.digest == again.digest


# The log


@pytest.mark.parametrize("called", [None, *Called])
def test_a_patch_that_was_not_called_has_a_reason(declare: Any, made: Any, called: Called | None) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[called])
    trl_hotfix.apply()
    (line,) = lines_of(made())
    start, _, reason = line.partition(": ")
    assert start == "made-up (r1) was not called"
    assert reason
    if called is Called.EVALUATION:
        assert reason == "evaluation never ran"


def test_a_reason_of_several_targets_is_given_once(declare: Any, made: Any) -> None:
    attributes, moments = f"{OWN_LOSS} MadeUpTrainer.evaluated", [Called.EVALUATION, Called.EVALUATION]
    declare(doubles(OWN_LOSS), double, attribute=attributes, module=NAME, called=moments)
    declare(doubles("MadeUpTrainer.prepare"), double, id="saved", attribute="MadeUpTrainer.prepare", module=NAME)
    trl_hotfix.apply()
    assert lines_of(made())[0] == "made-up (r1) was not called: evaluation never ran"


def test_the_summary_has_the_patches_of_this_trainer_by_name(declare: Any, made: Any) -> None:
    assert run.summary([]) == "none for this trainer"
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    declare(doubles("MadeUpTrainer.prepare"), double, id="second", attribute="MadeUpTrainer.prepare", module=NAME)
    for patch_id, attribute in (("third", "DPOTrainer.dpo_loss"), ("fourth", "DPOTrainer.get_batch_samples")):
        declare(is_marked, mark, id=patch_id, attribute=attribute)
    trl_hotfix.apply(skip=["fourth"])
    trainer = made()
    trainer.prepare(1)
    repairs = run.repairs(trainer, engine.ENGINE.status([trainer]))
    assert run.summary(repairs) == "repaired: second (r1); standing by: made-up (r1); 1 more for other trainers"
    assert run.summary(repairs[2:]) == "none for this trainer; 1 more for other trainers"
