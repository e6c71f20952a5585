"""The record of a run, from its beginning to its end. That of a checkpoint is data that may be damaged."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import DPOConfig

from trl_hotfix import api, witness
from trl_hotfix.catalogue import loading
from trl_hotfix.errors import NotAppliedError, SettingError
from trl_hotfix.model import Called, Hit, KnownBug, Outcome, Severity, Strict, Upstream, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.recording import callback as callbacks
from trl_hotfix.recording import run
from trl_hotfix.recording.agreement import Agreed, Problem
from trl_hotfix.recording.callback import HotfixCallback
from trl_hotfix.recording.problems import not_applied
from trl_hotfix.recording.trackers import FILE, KEY

from helpers.made_up_patches import WORDS, is_marked, mark, pass_through, returns_the_option, use_the_option
from helpers.records import RIGHT, like_a_function, records, warning_messages
from helpers.trl_like import NAME, double, doubles


def begin(folder: Path, record: Any, *, strict: bool = False) -> Any:
    """A training run that goes on from a checkpoint with this record, up to its first entry in the history."""
    state = TrainerState(log_history=[3, {"loss": 1.0}, {KEY: record, "step": 1}], is_world_process_zero=True)
    callback, args = HotfixCallback(strict), DPOConfig(output_dir=str(folder), report_to="none")
    callback.on_train_begin(args, state, TrainerControl())
    state.log_history.append({"loss": 2.0, "step": 2})
    callback.on_log(args, state, TrainerControl())
    return state


@like_a_function
@given(record=records)
def test_a_run_continues_with_any_record_in_its_checkpoint(
    record: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh_engine: engine.Engine
) -> None:
    caplog.clear()
    state = begin(tmp_path, record)
    assert state.log_history[-1] == {"loss": 2.0, "step": 2, KEY: run.record(None, api.status())}
    assert all(message.isprintable() for message in warning_messages(caplog))
    assert not any("not complete" in message for message in warning_messages(caplog))


def test_the_record_lists_what_is_on_and_nothing_else(declare: Any, tmp_path: Path) -> None:
    declare(returns_the_option, use_the_option, options=WORDS)
    verdicts = iter([Verdict.REPRODUCED, Verdict.REPRODUCED])
    declare(lambda module: Outcome(next(verdicts)), pass_through, id="failing", attribute="DPOTrainer.compute_loss")
    declare(is_marked, mark, id="left-out", attribute="DPOTrainer.get_batch_samples")
    api.apply(options={"made-up": {"word": "no"}}, skip=["left-out"])
    state = begin(tmp_path, None)
    recorded = state.log_history[-1][KEY]["patches"]
    assert [(entry["id"], entry["revision"], entry["options"]) for entry in recorded] == [
        ("made-up", 1, {"word": "no"})
    ]
    api.revert()
    assert begin(tmp_path, None).log_history[-1][KEY]["patches"] == []


@pytest.mark.parametrize("record", [None, [], "x", {"patches": 3}, {**RIGHT, "run": "rm"}, {"patches": [{"id": "x"}]}])
def test_a_damaged_record_in_a_checkpoint_is_one_warning(
    record: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh_engine: engine.Engine
) -> None:
    begin(tmp_path, record)
    assert warning_messages(caplog) == ["the checkpoint's record of its repairs cannot be read; they may be other ones"]


def test_a_damaged_record_does_not_switch_strict_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine
) -> None:
    problem = Problem("no trl_hotfix is on there", ranks=(1,))
    monkeypatch.setattr(callbacks, "agree", lambda says, moment: Agreed(says.level, (problem,)))
    with pytest.raises(NotAppliedError, match="rank 1"):
        begin(tmp_path, {"patches": 3}, strict=True)


# A run of a real trainer


OWN_LOSS = "MadeUpTrainer.own_loss"


class Events(TrainerCallback):  # type: ignore[misc]
    """Calls a function at one event of a run."""

    def __init__(self, event: str, function: Any) -> None:
        def call(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            function(state)

        setattr(self, event, call)


class Board:
    """The writer of TensorBoard. It cannot be pickled."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.lock = threading.Lock()
        self.flush = lambda: None

    def add_text(self, key: str, text: str) -> None:
        self.records.append(json.loads(text.removeprefix("```json\n").removesuffix("\n```")))


class TensorBoardCallback(TrainerCallback):  # type: ignore[misc]
    """A tracker. Its run starts when training begins, if it starts at all."""

    __module__ = "transformers.integrations.made_up"

    def __init__(self, *, starts: bool = True) -> None:
        self.tb_writer: Any = None
        self.board, self.starts = Board(), starts

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tb_writer = self.board if self.starts else None


@pytest.fixture
def applied(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trl_hotfix")
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[Called.STEP])
    declare(is_marked, mark, id="of-others")
    api.apply()


@pytest.fixture
def never_called(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A patch of a method that a step should call and does not."""
    caplog.set_level(logging.INFO, logger="trl_hotfix")
    attribute = "MadeUpTrainer.evaluated"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.STEP])
    api.apply()


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "trl_hotfix" and record.levelno == level]


def entry(record: Any, patch_id: str = "made-up") -> tuple[str, int, int]:
    (found,) = (one for one in record["patches"] if one["id"] == patch_id)
    return found["word"], found["called"], found["acted"]


def history(state: Any) -> list[Any]:
    return [one[KEY] for one in state["log_history"] if KEY in one]


@pytest.mark.usefixtures("applied")
def test_the_record_grows_with_the_run(trl_like: Any, tmp_path: Path) -> None:
    board, out = TensorBoardCallback(), tmp_path / "out"
    callbacks = [HotfixCallback(), board]
    trainer = trl_like.trainer(out, callbacks=callbacks, max_steps=3, save_strategy="steps", save_steps=1)
    trainer.train()
    final = history(vars(trainer.state))
    assert [entry(record) for record in final] == [("repaired", 3, 3)]
    assert [entry(record, "of-others") for record in final] == [("selected", 0, 0)]
    for step in (1, 2, 3):
        checkpoint = out / f"checkpoint-{step}"
        assert entry(json.loads((checkpoint / FILE).read_text())) == ("repaired", step, step)
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert [entry(record) for record in history(state)] == [("repaired", step, step)]
    assert [json.loads((out / FILE).read_text())] == final
    # At the first step, at each save, at the end.
    assert [entry(record)[1] for record in board.board.records] == [0, 1, 2, 3, 3]
    assert board.board.records[-1] == final[0]
    assert not list(out.rglob("*.tmp"))


@pytest.mark.usefixtures("applied")
def test_only_the_record_of_this_run_is_refreshed(trl_like: Any, tmp_path: Path) -> None:
    """Those of the runs before a checkpoint stay, even if they are equal."""
    earlier = run.record(None, api.status())
    before = copy.deepcopy(earlier)
    resumed = Events("on_train_begin", lambda state: state.log_history.append({"loss": 1.0, KEY: earlier}))
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[resumed, HotfixCallback()])
    trainer.train()
    first, second = history(vars(trainer.state))
    assert first == before
    assert entry(second) == ("repaired", 2, 2)


@pytest.mark.usefixtures("applied")
def test_a_second_training_has_a_record_of_its_own(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="trl_hotfix")
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()])
    for _ in range(2):
        trainer.train()
        assert len(history(vars(trainer.state))) == 1
    assert len([line for line in said(caplog, logging.DEBUG) if line.startswith("training with TRL")]) == 2


def test_the_calls_of_a_function_are_counted_for_one_run(declare: Any, trl_like: Any, tmp_path: Path) -> None:
    hits = (Hit(("*",), "a symptom"),)
    declare(doubles("scaled"), double, attribute="scaled", module=NAME, called=[Called.STEP], hits=hits)
    api.apply()

    class Scaling(trl_like.module.MadeUpTrainer):  # type: ignore[misc, name-defined]
        def own_loss(self, loss: Any) -> Any:
            return trl_like.module.scaled(loss)

    # What a callback calls between the steps is none of them.
    calling = Events("on_step_begin", lambda state: trl_like.module.scaled(1))
    for _ in range(2):
        trainer = trl_like.trainer(tmp_path / "out", cls=Scaling, callbacks=[HotfixCallback(), calling])
        trainer.train()
        (record,) = history(vars(trainer.state))
        assert entry(record) == ("repaired", 2, 2)
        other = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(), calling])
        other.train()
        (record,) = history(vars(other.state))
        assert entry(record) == ("standing by", 0, 0)


@pytest.mark.usefixtures("applied")
def test_each_patch_of_this_trainer_has_a_line_at_the_end(
    declare: Any, trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attribute = "MadeUpTrainer.evaluated"
    declare(doubles(attribute), double, id="other", attribute=attribute, module=NAME, called=[Called.EVALUATION])
    declare(doubles("MadeUpTrainer.gone"), double, id="gone", attribute="MadeUpTrainer.gone", module=NAME)
    api.apply(skip=["gone"])
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()])
    caplog.clear()
    caplog.set_level(logging.DEBUG, logger="trl_hotfix")
    trainer.train()
    begin_line = said(caplog, logging.DEBUG)[0]
    assert begin_line.endswith(": standing by: made-up (r1), other (r1); 1 more for other trainers")
    counts = "acted in 2 of 2 calls, in 2 of 2 steps"
    _, *end = said(caplog)
    assert end == [
        f"repaired: made-up (bug: a made-up patch); your run: found by the repair itself; {counts}",
        "this run: hit 1, repaired 1; cannot tell 3: gone, of-others, other",
    ]
    assert said(caplog, logging.DEBUG)[-1:] == ["other (r1) was not called: evaluation never ran"]
    assert warning_messages(caplog) == []


# After the first step


@pytest.mark.usefixtures("never_called")
@pytest.mark.parametrize("settings", [{}, {"logging_steps": 100}, {"logging_strategy": "no"}], ids=str)
def test_the_first_step_is_looked_at_once_and_before_the_second(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    steps: list[Any] = []
    look = HotfixCallback._look_after_step

    def note(self: HotfixCallback, state: Any) -> None:
        if self._first_step is not None and state.global_step > self._first_step:
            steps.append("look")
        look(self, state)

    monkeypatch.setattr(HotfixCallback, "_look_after_step", note)
    begins = Events(
        "on_step_begin", lambda state: steps.append((state.global_step, len(said(caplog, logging.WARNING))))
    )
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[begins, HotfixCallback()], max_steps=3, **settings)
    caplog.clear()
    trainer.train()
    assert steps == [(0, 0), "look", (1, 1), (2, 1)]
    (warning,) = said(caplog, logging.WARNING)
    by = f"{NAME}.MadeUpTrainer took a step without a call of MadeUpTrainer.evaluated"
    assert warning == f"made-up: unreached (not-called): {by}"
    (record,) = history(vars(trainer.state))
    assert record["patches"] == []
    assert [one["reason"] for one in record["unreached"]] == ["not-called"]
    # A second training begins anew.
    trainer.train()
    assert steps[4:] == [(0, 1), "look", (1, 2), (2, 2)]


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"eval_on_start": True}], ids=str)
def test_neither_a_micro_batch_nor_an_evaluation_is_a_step(
    trl_like: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(witness.Run, "step_ends", lambda run, ledger: steps.append(trainer.state.global_step))
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()], **settings)
    trainer.train()
    assert steps == [1, 2]


@pytest.mark.usefixtures("never_called")
@pytest.mark.parametrize("strict", [(True,), (True, False), (False, True)], ids=str)
def test_strict_ends_the_run_after_its_first_step(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: tuple[bool, ...]
) -> None:
    """Of two callbacks the first is active. The strictness of the other counts too."""
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(one) for one in strict], max_steps=3)
    with pytest.raises(NotAppliedError, match=r"training ends after step 1:\n  made-up: unreached \(not-called\)"):
        trainer.train()
    assert trainer.state.global_step == 1
    assert len(said(caplog, logging.WARNING)) == 1


def test_a_hit_whose_method_one_of_the_users_own_replaces_is_a_problem(
    declare: Any, trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not every step calls the target, so that a step without a call is none. But this run has the bug."""
    hits, attribute = (Hit(("MadeUp",), "a symptom"),), "MadeUpTrainer.own_loss"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.SOME_STEPS], hits=hits)
    api.apply()

    class Mine(trl_like.module.MadeUpTrainer):  # type: ignore[misc, name-defined]
        def own_loss(self, loss: Any) -> Any:
            return loss

    trainer = trl_like.trainer(tmp_path / "out", cls=Mine, callbacks=[HotfixCallback()])
    caplog.clear()
    trainer.train()
    (warning,) = said(caplog, logging.WARNING)
    assert warning.startswith("made-up: no step called it, but ")
    assert warning.endswith("Mine.own_loss; this run has the bug: as every run of this trainer")
    (record,) = history(vars(trainer.state))
    assert record["problems"] == [warning]
    with pytest.raises(NotAppliedError, match="no step called it"):
        trl_like.trainer(tmp_path / "out", cls=Mine, callbacks=[HotfixCallback(strict=True)]).train()


@pytest.mark.parametrize("strict", [(True,), (False, True)], ids=str)
def test_strict_begins_no_run_of_a_trainer_made_before(
    declare: Any, trl_like: Any, tmp_path: Path, strict: tuple[bool, ...]
) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(one) for one in strict])
    attribute = "MadeUpTrainer.prepare"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.CONSTRUCTION])
    api.apply()
    with pytest.raises(NotAppliedError, match=r"training does not begin:\n  made-up: unreached \(made-before\): a "):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("hits", "strict", "ends"),
    [
        ((Hit(("MadeUp",), "a symptom"),), True, True),
        ((Hit(("MadeUp",), "a symptom", depends="what nobody knows"),), True, True),
        ((), True, True),
        ((Hit(("Another",), "a symptom"),), True, False),
        ((Hit(("MadeUp",), "a symptom", when={"max_steps": 17}),), True, False),
        ((Hit(("MadeUp",), "a symptom", when={"max_steps": 17}),), "all", True),
        ((Hit(("MadeUp",), "a symptom"),), False, False),
    ],
    ids=["hit", "may hit", "not declared", "another trainer", "other arguments", "other arguments, all", "not strict"],
)
def test_strict_ends_the_runs_that_hit_the_bug_or_may_hit_it(
    declare: Any, trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, hits: Any, strict: Any, ends: bool
) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict)])
    attribute = "MadeUpTrainer.prepare"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.CONSTRUCTION], hits=hits)
    api.apply()
    caplog.clear()
    if ends:
        with pytest.raises(NotAppliedError) as raised:
            trainer.train()
        first, reason, way_on = str(raised.value).split("\n")
        assert first == "strict mode: training does not begin:"
        assert reason.startswith("  made-up: unreached (made-before): a ")
        assert way_on == "To go on without: TRL_HOTFIX_SKIP=made-up"
        api.apply(skip=["made-up"])
    trainer.train()
    assert trainer.state.global_step == 2
    first, *others = said(caplog, logging.WARNING)
    assert first.startswith("made-up: unreached (made-before)")
    # What is left out, and is no bug of this run, has no line.
    left_out = "not repaired, left out on request: made-up (bug: a made-up patch)"
    certain = ends and bool(hits) and hits[0].depends is None and not hits[0].when
    assert [line.partition(";")[0] for line in others] == ([left_out] if certain else [])


@pytest.mark.parametrize("strict", [True, "all"])
def test_a_known_bug_without_a_repair_is_a_warning_and_ends_no_run(
    trl_like: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: Any
) -> None:
    def known(patch_id: str, trainer: str, **settings: Any) -> KnownBug:
        hits = (Hit((trainer,), "a symptom", **settings),)
        return KnownBug(patch_id, "it is wrong", Severity.WRONG_LOSS, ">=0.1", Upstream(), "why", hits)

    bugs = known("of-it", "MadeUp"), known("of-others", "Another"), known("may-be", "MadeUp", depends="the weather")
    monkeypatch.setattr(loading, "without_repair", lambda: bugs)
    api.apply()
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict)])
    trainer.train()
    line = "of-it: there is no repair of it (it is wrong); this run has the bug: as every run of this trainer"
    assert said(caplog, logging.WARNING) == [line]
    (record,) = history(vars(trainer.state))
    assert record["problems"] == [line]


@pytest.mark.parametrize(("strict", "step"), [(True, 2), ("all", 1), (False, 4)])
def test_a_wrapper_that_fails_in_a_later_step_ends_a_strict_run(
    declare: Any, trl_like: Any, tmp_path: Path, strict: Any, step: int
) -> None:
    """Under strict at the end of its step, under `strict-all` in the call."""
    calls: list[int] = []

    def fails_later(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if hasattr(instance, "state") and instance.state.global_step:
            calls.append(instance.state.global_step)
            raise LookupError("not here")
        return 2 * wrapped(*args, **kwargs)

    declare(doubles(OWN_LOSS), fails_later, attribute=OWN_LOSS, module=NAME, called=[Called.STEP])
    api.apply(strict=strict)
    trainer = trl_like.trainer(tmp_path / "out", max_steps=4)
    if strict == "all":
        with pytest.raises(LookupError, match="not here"):
            trainer.train()
    elif strict:
        with pytest.raises(NotAppliedError, match=r"training ends after step 2:\n  made-up: failed \(wrapper-error\)"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == step
    assert calls == [1]


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_strict_apply_in_a_script_gives_every_trainer_the_callback(
    declare: Any, trl_like: Any, tmp_path: Path, made: str
) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called=[Called.STEP])

    class Mine(trl_like.module.MadeUpTrainer):  # type: ignore[misc, name-defined]
        def own_loss(self, loss: Any) -> Any:
            return loss

    trainer = trl_like.trainer(tmp_path / "out", cls=Mine) if made == "before" else None
    api.apply(strict=True)
    trainer = trainer or trl_like.trainer(tmp_path / "out", cls=Mine)
    with pytest.raises(NotAppliedError, match=r"training ends after step 1:\n  made-up: unreached \(overridden\)"):
        trainer.train()
    # The last call decides.
    api.apply(strict=False)
    trl_like.trainer(tmp_path / "again", cls=Mine).train()


def test_strict_without_its_callback_is_a_mistake(monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine) -> None:
    monkeypatch.setenv("TRL_HOTFIX_CALLBACK", "0")
    with pytest.raises(SettingError, match="TRL_HOTFIX_CALLBACK=0 leaves out the callback that decides under strict"):
        api.apply(strict=True)
    api.apply(strict=False)


@pytest.mark.parametrize("strict", ["ALL", "strict", 1, "yes"])
def test_an_unknown_level_is_a_mistake(fresh_engine: engine.Engine, strict: Any) -> None:
    with pytest.raises(SettingError, match="expected True, False or 'all'"):
        api.apply(strict=strict)
    with pytest.raises(SettingError, match="expected True, False or 'all'"):
        HotfixCallback(strict)


WITH_IDS = (Problem("a: failed", "made-up"), Problem("b: failed", "b"), Problem("a: again", "made-up"))
WITHOUT_ID = (*WITH_IDS, Problem("no trl_hotfix is on there", ranks=(3,)))


@pytest.mark.parametrize(
    ("variables", "arguments", "by_hand", "reasons", "way_on"),
    [
        ({"TRL_HOTFIX": "strict"}, {}, None, WITH_IDS, "TRL_HOTFIX_SKIP=made-up,b"),
        ({"TRL_HOTFIX": "strict", "TRL_HOTFIX_SKIP": "c"}, {}, None, WITH_IDS, "TRL_HOTFIX_SKIP=c,made-up,b"),
        ({}, {"skip": ["c"], "strict": True}, None, WITH_IDS, "skip=['c', 'made-up', 'b']"),
        ({}, {"strict": True}, None, WITH_IDS, "TRL_HOTFIX_SKIP=made-up,b"),
        ({"TRL_HOTFIX": "strict"}, {}, None, WITHOUT_ID, "TRL_HOTFIX=1"),
        ({"TRL_HOTFIX": "strict"}, {"strict": True}, None, WITHOUT_ID, "TRL_HOTFIX=1 and strict=False"),
        ({"TRL_HOTFIX": "strict"}, {}, True, WITHOUT_ID, "TRL_HOTFIX=1 and strict=False"),
        ({}, {}, True, WITHOUT_ID, "strict=False"),
    ],
)
def test_the_way_on_is_one_that_works(
    declare: Any,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    arguments: dict[str, Any],
    by_hand: bool | None,
    reasons: tuple[Problem, ...],
    way_on: str,
) -> None:
    for patch_id in ("made-up", "b", "c"):
        declare(is_marked, mark, id=patch_id)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    api.apply(**arguments)
    assert HotfixCallback(by_hand)._way_on(reasons) == way_on


def test_a_strict_callback_where_nothing_is_applied_is_a_problem(
    trl_like: Any, tmp_path: Path, fresh_engine: engine.Engine
) -> None:
    with pytest.raises(NotAppliedError, match=r"nothing is applied: call trl_hotfix\.apply\(\)"):
        trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict=True)]).train()


def test_other_ranks_than_the_first_name_one_reason() -> None:
    agreed = Agreed(Strict.RUN, (Problem("a: failed", "a"), Problem("no trl_hotfix is on there", ranks=(3,))))
    assert str(not_applied(agreed, "it ends", 2, 4, "strict=False")).split("\n") == [
        "strict mode: it ends on any rank:",
        "  a: failed",
        "  and 1 more, which rank 0 names",
        "To go on without: strict=False",
    ]


def test_what_was_said_at_the_beginning_is_not_said_again_after_a_step(
    declare: Any, trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()])
    attribute = "MadeUpTrainer.prepare"
    declare(doubles(attribute), double, attribute=attribute, module=NAME, called=[Called.CONSTRUCTION])
    api.apply()
    caplog.clear()
    trainer.train()
    assert len(said(caplog, logging.WARNING)) == 1


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("strict", [False, True], ids=str)
@pytest.mark.parametrize(("failing", "steps"), [(("Ledger", "begin_run"), 0), (("Run", "step_ends"), 1)])
def test_a_look_that_fails_is_no_success_under_strict(
    trl_like: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: tuple[str, str],
    steps: int,
    strict: bool,
) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("unhashable type: 'KTOTrainer'")

    monkeypatch.setattr(getattr(witness, failing[0]), failing[1], fail)
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict)], max_steps=3)
    if strict:
        with pytest.raises(NotAppliedError, match="could not be checked"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == (steps if strict else 3)
    assert any("unhashable type" in message for message in warning_messages(caplog))


@pytest.mark.usefixtures("applied")
def test_a_healthy_run_is_silent_under_strict(trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict=True)], eval_strategy="steps")
    trainer.train()
    assert trainer.state.global_step == 2
    assert said(caplog, logging.WARNING) == []


# Going on from a checkpoint


UNKNOWN = "this run goes on from a checkpoint without a record: its steps may not have been repaired"


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize(
    ("step", "record", "expected"),
    [(2, False, [UNKNOWN]), (0, False, []), (2, True, [])],
    ids=["without", "new", "with"],
)
def test_resuming_without_a_record_is_said(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, record: bool, expected: list[str]
) -> None:
    def resume(state: Any) -> None:
        state.global_step = step
        if record:
            state.log_history.append({"loss": 1.0, KEY: run.record(None, api.status())})

    caplog.clear()
    resuming = Events("on_train_begin", resume)
    trl_like.trainer(tmp_path / "out", callbacks=[resuming, HotfixCallback()], max_steps=4).train()
    assert said(caplog, logging.WARNING) == expected


@pytest.mark.usefixtures("fresh_engine")
def test_resuming_without_a_record_is_not_said_where_nothing_is_repaired(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resuming = Events("on_train_begin", lambda state: setattr(state, "global_step", 1))
    trl_like.trainer(tmp_path / "out", callbacks=[resuming, HotfixCallback()], max_steps=3).train()
    assert said(caplog, logging.WARNING) == []


@pytest.mark.usefixtures("applied")
def test_an_evaluation_alone_resumes_nothing_and_is_on_record(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict=True)])
    trainer.state.global_step = 2
    caplog.clear()
    caplog.set_level(logging.DEBUG, logger="trl_hotfix")
    trainer.evaluate()
    assert said(caplog, logging.WARNING) == []
    (line,) = said(caplog, logging.DEBUG)
    assert line.startswith("evaluating with TRL 0.11.4, digest ")
    assert line.endswith(": in evaluation only: made-up (r1); 1 more for other trainers")
    assert [entry(record) for record in history(vars(trainer.state))] == [("in evaluation only", 0, 0)]
    trainer.evaluate()
    assert len(history(vars(trainer.state))) == 1


# Copies


@pytest.mark.usefixtures("applied")
def test_the_state_and_the_callback_can_be_copied_while_trackers_wait(trl_like: Any, tmp_path: Path) -> None:
    waiting, started = TensorBoardCallback(starts=False), TensorBoardCallback()
    callback, copies = HotfixCallback(strict=True), []

    def copied(state: Any) -> None:
        assert [name for name, _ in callback._waiting_trackers] == ["TensorBoardCallback"]
        for one in (state, callback):
            copies.append(copy.deepcopy(one))
            copies.append(pickle.loads(pickle.dumps(one)))

    copying = Events("on_step_end", lambda state: copied(state) if state.global_step == 1 else None)
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[callback, waiting, started, copying])
    trainer.train()
    *states, by_copy, by_pickle = copies
    assert [state.global_step for state in states] == [1, 1]
    assert waiting.board.records == []
    assert entry(started.board.records[-1]) == ("repaired", 2, 2)
    for one in (by_copy, by_pickle):
        assert one._strict
        # A copy writes into no tracker twice, and can take part in a run.
        assert one._trackers == one._waiting_trackers == []
        again = trl_like.trainer(tmp_path / "again", callbacks=[one])
        again.train()
        assert [entry(record) for record in history(vars(again.state))] == [("repaired", 2, 2)]


@pytest.mark.usefixtures("applied")
def test_a_trainer_can_be_copied_with_its_callback(trl_like: Any, tmp_path: Path) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(), TensorBoardCallback()])
    trainer.train()
    state, callback = copy.deepcopy((trainer.state, trainer.callback_handler.callbacks[0]))
    assert history(vars(state)) == history(vars(trainer.state))
    assert callback is not trainer.callback_handler.callbacks[0]


# Without a trainer on the stack


def test_what_is_observed_is_not_known_without_a_trainer(declare: Any, tmp_path: Path) -> None:
    declare(is_marked, mark)
    api.apply(observe=True)
    state = begin(tmp_path, None)
    assert state.log_history[-1][KEY]["patches"] == []
    assert "observed" not in state.log_history[-1][KEY]


# The disk is full


@pytest.mark.usefixtures("applied")
def test_a_record_that_cannot_be_written_leaves_the_one_before(
    trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / FILE).write_text("a good record")

    def full(path: Path, target: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    trainer = trl_like.trainer(out, callbacks=[HotfixCallback()])
    trainer.train()
    assert (out / FILE).read_text() == "a good record"
    assert not list(out.glob("*.tmp"))
    (warning,) = said(caplog, logging.WARNING)
    assert "on_train_end failed (OSError: No space left on device)" in warning


# Another rank than 0


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_on_which_a_patch_fails_leaves_its_own_record(
    trl_like: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "trl_hotfix.rank-7.json").write_text("of an earlier run")
    trainer = trl_like.trainer(out, callbacks=[HotfixCallback()])
    (module_patch,) = [one for one in engine.ENGINE.module_patches() if one.patch.id == "made-up"]

    def fail(state: Any) -> None:
        if fails:
            module_patch.breaker.broken, module_patch.breaker.error = True, "RuntimeError: x\n\x1b[31m"
        # Rank 0 of this process becomes another one, as its end is that of any rank.
        state.is_world_process_zero = False
        monkeypatch.setattr(type(trainer.args), "process_index", 3)

    trainer.add_callback(Events("on_step_begin", fail))
    trainer.train()
    assert {path.name for path in out.glob("trl_hotfix*")} == ({"trl_hotfix.rank-3.json"} if fails else set())
    if fails:
        record = json.loads((out / "trl_hotfix.rank-3.json").read_text())
        assert record["problems"] == ["made-up: failed (wrapper-error)"]


@pytest.mark.usefixtures("never_called")
def test_what_is_warned_of_is_on_record(trl_like: Any, tmp_path: Path) -> None:
    trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()]).train()
    (problem,) = json.loads((tmp_path / "out" / FILE).read_text())["problems"]
    assert problem.startswith("made-up: unreached (not-called)")


@pytest.mark.usefixtures("applied")
def test_the_record_of_the_beginning_is_built_once(
    trl_like: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    record = run.record
    monkeypatch.setattr(run, "record", lambda *given: built.append(record(*given)) or built[-1])
    counts: list[int] = []
    later = Events("on_train_begin", lambda state: counts.append(len(built)))
    trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(), later]).train()
    assert counts == [1]
    assert built[0]["patches"]
    # The trainer was asked: of patches without conditions nothing can be told.
    assert {(hit["id"], hit["answer"]) for hit in built[0]["hits"]} == {
        ("made-up", "cannot tell"),
        ("of-others", "cannot tell"),
    }


@pytest.mark.usefixtures("applied")
def test_a_run_whose_ranks_cannot_be_compared_is_on_record(
    trl_like: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Agreed:
        raise OSError("the store is gone")

    monkeypatch.setattr(callbacks, "agree", fail)
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()])
    trainer.train()
    assert [entry(record) for record in history(vars(trainer.state))] == [("repaired", 2, 2)]
