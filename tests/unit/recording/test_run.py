"""What each patch was to a run: a word and its counts, in the record and in the log."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix import witness
from trl_hotfix.authoring import act_of_this_call
from trl_hotfix.model import Called, Hit, Outcome, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.recording import run
from trl_hotfix.recording.run import Word
from trl_hotfix.selection import freeze_files
from trl_hotfix.witness import Here, Phase

from helpers.made_up_patches import WORDS, is_marked, mark, returns_the_option, use_the_option
from helpers.trl_like import NAME, double, doubles

OWN_LOSS = "MadeUpTrainer.own_loss"


@pytest.fixture
def made(trl_like: Any) -> Any:
    """Return a function that makes a trainer whose constructor has run."""

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


@contextmanager
def doing(trainer: Any, phase: Phase) -> Iterator[None]:
    before, Here.thread.doing = Here.thread.doing, witness.doing(trainer, phase)
    try:
        yield
    finally:
        Here.thread.doing = before


def step(trainer: Any, *work: Any) -> None:
    """Take a step of a run in which the trainer does this work."""
    with doing(trainer, Phase.STEP):
        for one in work:
            one()
    ledger = witness.ledger_of(trainer)
    ledger.run.step_ends(ledger)


def double_whatever_the_option(wrapped: Any, instance: Any, args: Any, kwargs: Any, *, options: Any) -> Any:
    return wrapped(*args, **kwargs) * 2


def doubles_whatever_the_option(module: Any, *, options: Any) -> Any:
    return doubles(OWN_LOSS)(module)


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


def test_a_trainer_that_overrides_the_patched_method_is_concerned(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    trl_hotfix.apply()

    class Mine(type(made())):  # type: ignore[misc]
        def own_loss(self, loss: Any) -> Any:
            return super().own_loss(loss)

    trainer = made(Mine)
    assert repairs_of(trainer) == {"made-up": (Word.STANDING_BY, 0, 0)}
    trainer.own_loss(1)
    assert repairs_of(trainer) == {"made-up": (Word.REPAIRED, 1, 1)}


def test_the_calls_of_a_function_are_those_of_the_trainer_that_does_it(declare: Any, made: Any, trl_like: Any) -> None:
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, hits=(Hit(("*",), "a symptom"),))
    trl_hotfix.apply()
    trainer, other = made(), made()
    trl_like.module.scaled(1)
    with doing(trainer, Phase.CONSTRUCT):
        trl_like.module.scaled(1)
        trl_like.module.scaled(1)
    assert repairs_of(trainer)["made-up"] == (Word.REPAIRED, 2, 2)
    assert repairs_of(other)["made-up"] == (Word.STANDING_BY, 0, 0)
    (entry,) = record_of(other)["patches"]
    assert entry["process"] == {"called": 1, "acted": 1}


def test_what_another_thread_calls_is_no_repair_of_a_run(declare: Any, made: Any, trl_like: Any) -> None:
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, hits=(Hit(("*",), "a symptom"),))
    trl_hotfix.apply()
    trainer = made()
    with doing(trainer, Phase.STEP):
        thread = threading.Thread(target=trl_like.module.scaled, args=(1,))
        thread.start()
        thread.join(60)
    assert repairs_of(trainer)["made-up"] == (Word.STANDING_BY, 0, 0)


def test_the_counts_of_all_targets_of_a_patch_are_added(declare: Any, made: Any, trl_like: Any) -> None:
    attributes = f"{OWN_LOSS} MadeUpTrainer.evaluated scaled"
    declare(doubles(OWN_LOSS), at_most(1), attribute=attributes, module=NAME)
    trl_hotfix.apply()
    trainer = made()
    trainer.own_loss(1)
    trainer.evaluated(5)
    with doing(trainer, Phase.TRAIN):
        trl_like.module.scaled(1)
    assert repairs_of(trainer)["made-up"] == (Word.REPAIRED, 3, 2)


# Phases and steps


@pytest.mark.parametrize("called", [Called.STEP, Called.SOME_STEPS, Called.DATA, Called.CONSTRUCTION])
def test_what_evaluations_alone_call_is_no_repair(declare: Any, made: Any, called: Called) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[called])
    trl_hotfix.apply()
    trainer = made()
    with doing(trainer, Phase.EVALUATE):
        trainer.own_loss(1)
    report = engine.ENGINE.status([])
    (repair,) = run.repairs(trainer, report)
    assert (repair.word, repair.called, repair.evaluation) == (Word.IN_EVALUATION_ONLY, 0, (1, 1))
    assert repair.line() == "made-up (r1) was called in evaluations only, once"
    assert repair.to_dict()["evaluation"] == {"called": 1, "acted": 1}


@pytest.mark.parametrize("called", [None, Called.EVALUATION, Called.GENERATION, Called.PREPARATION])
def test_a_patch_of_evaluations_repairs_in_them(declare: Any, made: Any, called: Called | None) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[called])
    trl_hotfix.apply()
    trainer = made()
    with doing(trainer, Phase.EVALUATE):
        trainer.own_loss(1)
    assert repairs_of(trainer)["made-up"] == (Word.REPAIRED, 1, 1)


def test_data_that_were_prepared_elsewhere_are_not_seen(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[Called.DATA])
    trl_hotfix.apply()
    trainer = made()
    assert repairs_of(trainer)["made-up"][0] is Word.STANDING_BY
    witness.ledger_of(trainer).begin_run()
    step(trainer)
    assert repairs_of(trainer)["made-up"][0] is Word.NOT_SEEN


def test_what_was_handed_on_and_saw_nothing_is_not_seen(declare: Any, made: Any) -> None:
    marks: list[Any] = []

    def later(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        marks.append(act_of_this_call())
        return wrapped(*args, **kwargs)

    verdicts = iter([Verdict.REPRODUCED, Verdict.FIXED])
    outcome = lambda module: Outcome(next(verdicts))  # noqa: E731
    declare(outcome, later, attribute=OWN_LOSS, module=NAME, called=[Called.PREPARATION])
    trl_hotfix.apply()
    trainer = made()
    words = []
    for say in (lambda: None, lambda: marks[0].saw(), lambda: marks[0]()):
        if not words:
            trainer.own_loss(1)
        say()
        words.append(repairs_of(trainer)["made-up"][0])
    assert words == [Word.NOT_SEEN, Word.CALLED, Word.REPAIRED]


def test_the_record_has_the_steps_in_which_a_patch_was_on(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), at_most(1), attribute=OWN_LOSS, module=NAME, called=[Called.STEP])
    trl_hotfix.apply()
    trainer = made()
    witness.ledger_of(trainer).begin_run()
    step(trainer, lambda: trainer.own_loss(1), lambda: trainer.own_loss(1))
    step(trainer, lambda: trainer.own_loss(2))
    (entry,) = record_of(trainer)["patches"]
    assert entry["steps"] == {"of": 2, "called": 2, "acted": 1, "on": [[1, 2]]}
    (repair,) = run.repairs(trainer, engine.ENGINE.status([trainer]))
    assert repair.line() == "made-up (r1) acted in 2 of 3 calls, in 1 of 2 steps"
    assert list(repair.problems()) == []
    trl_hotfix.revert()
    step(trainer, lambda: trainer.own_loss(1))
    trl_hotfix.apply()
    step(trainer, lambda: trainer.own_loss(1))
    step(trainer, lambda: trainer.own_loss(1))
    (repair,) = run.repairs(trainer, engine.ENGINE.status([trainer]))
    assert list(repair.problems()) == ["made-up: on in 3 of 5 steps (1 to 2, 5)"]
    # A run that begins now is another one.
    witness.ledger_of(trainer).begin_run()
    step(trainer, lambda: trainer.own_loss(1))
    (repair,) = run.repairs(trainer, engine.ENGINE.status([trainer]))
    assert (repair.called, list(repair.problems())) == (1, [])


def test_the_options_on_record_are_those_that_acted(declare: Any, made: Any) -> None:
    attributes = f"{OWN_LOSS} MadeUpTrainer.prepare"
    moments = [Called.CONSTRUCTION, Called.STEP]
    declare(
        doubles_whatever_the_option, double_whatever_the_option, options=WORDS,
        attribute=attributes, module=NAME, called=moments,
    )  # fmt: skip
    report = trl_hotfix.apply(options={"made-up": {"word": "no"}})
    trainer = made()
    with doing(trainer, Phase.CONSTRUCT):
        trainer.own_loss(1)
    witness.note_construction(trainer)
    later = trl_hotfix.apply(options={"made-up": {"word": "yes"}})
    record = record_of(trainer)
    assert [entry["options"] for entry in record["patches"]] == [{"word": "no"}]
    assert record["digest"] == report.digest != later.digest
    witness.ledger_of(trainer).begin_run()
    step(trainer, lambda: trainer.prepare(1))
    (repair,) = run.repairs(trainer, engine.ENGINE.status([trainer]))
    assert list(repair.problems()) == ["made-up: it acted with several options in this run"]


def test_a_copy_has_what_its_original_was_made_with(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[Called.CONSTRUCTION])
    before = made()
    trl_hotfix.apply()
    trainer = made()
    with doing(trainer, Phase.CONSTRUCT):
        trainer.own_loss(1)
    witness.note_construction(trainer)
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert repairs_of(copied)["made-up"] == (Word.REPAIRED, 1, 1)
    assert repairs_of(copy.deepcopy(before)) == {}


def test_without_a_trainer_all_patches_are_concerned(declare: Any, made: Any) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME)
    declare(is_marked, mark, id="another")
    trl_hotfix.apply()
    assert {word for word, *_ in repairs_of(None).values()} == {Word.STANDING_BY}


# What is taken off


@pytest.mark.parametrize("called", list(Called))
def test_what_has_acted_stays_in_the_run_after_revert(declare: Any, made: Any, called: Called) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[called])
    trl_hotfix.apply()
    trainer, unused = made(), made()
    trainer.own_loss(1)
    trl_hotfix.revert()
    assert repairs_of(unused) == {}
    assert "reverted" not in record_of(unused)
    record = record_of(trainer)
    assert record["patches"] == []
    entry = {"id": "made-up", "revision": 1, "options": {}, "word": "repaired", "called": 1, "acted": 1}
    assert record["reverted"] == [entry]


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
    after = made()
    with doing(after, Phase.CONSTRUCT):
        after.own_loss(1)
    assert record_of(after).keys() == {"schema", "trl_hotfix", "trl", "digest", "patches"}


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


@pytest.mark.parametrize("called", [None, *(moment for moment in Called if moment is not Called.CONSTRUCTION)])
def test_a_patch_that_was_not_called_has_a_reason(declare: Any, made: Any, called: Called | None) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[called])
    trl_hotfix.apply()
    trainer = made()
    witness.note_construction(trainer)
    (line,) = lines_of(trainer)
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
