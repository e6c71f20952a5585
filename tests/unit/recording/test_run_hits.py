"""Which known bugs a run hits, repaired or not: asked of its trainer when training begins."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import trl_hotfix
from trl_hotfix import api
from trl_hotfix.catalogue import loading
from trl_hotfix.log import FIELDS
from trl_hotfix.matching.hits import Answer
from trl_hotfix.model import Called, Hit, Reason, Severity, State
from trl_hotfix.patching import engine
from trl_hotfix.recording import run_hits
from trl_hotfix.recording.callback import HotfixCallback
from trl_hotfix.recording.trackers import FILE
from trl_hotfix.reporting.report import PatchStatus, Report
from trl_hotfix.selection import freeze_files

from helpers.trl_like import NAME, double, doubles

METHODS = ("MadeUpTrainer.own_loss", "MadeUpTrainer.evaluated", "MadeUpTrainer.prepare")


def hit(depends: str | None = None, **when: Any) -> tuple[Hit, ...]:
    return (Hit(("*",), "it is off by 4", when, depends),)


@pytest.fixture
def run(declare: Any, trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that trains with patches of these hits, and returns the lines of the log and the record."""
    caplog.set_level(logging.INFO, logger="trl_hotfix")

    def train(*hits: tuple[Hit, ...], cls: Any = None, made: Any = None, **arguments: Any) -> Any:
        for number, entry in enumerate(hits):
            method = METHODS[number % len(METHODS)]
            declare(doubles(method), double, id=f"bug-{number}", attribute=method, module=NAME, hits=entry)
        api.apply(**arguments)
        trainer = made or trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()], max_steps=3)
        caplog.clear()
        trainer.train()
        lines = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "trl_hotfix"]
        return lines, json.loads((tmp_path / "out" / FILE).read_text()), trainer

    return train


def about(lines: Any, patch_id: str) -> list[str]:
    """Return the lines of one bug, without the first line of the run, which names all patches."""
    return [line for _, line in lines if f": {patch_id} (bug: " in line]


def test_a_hit_is_one_line_when_training_begins_and_the_rest_is_none(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lines, record, _ = run(hit(max_steps=3), hit(max_steps=4), hit("the model is large", max_steps=3))
    begin, end = about(lines, "bug-0")
    assert begin == "repairs: bug-0 (bug: a made-up patch); your run: max_steps=3"
    assert end == "repaired: bug-0 (bug: a made-up patch); your run: max_steps=3; acted in 3 of 3 calls"
    assert about(lines, "bug-1") == []
    # The arguments do not tell. The repair has found the bug.
    found = "your run: max_steps=3, found by the repair itself; acted in 1 of 1 calls"
    assert about(lines, "bug-2")[-1] == f"repaired: bug-2 (bug: a made-up patch); {found}"
    assert [(one["id"], one["answer"], one["unknown"]) for one in record["hits"]] == [
        ("bug-0", "hit", []),
        ("bug-2", "hit", []),
    ]
    assert {(one["state"], one["reason"]) for one in record["hits"]} == {("applied", "proven")}
    events = [getattr(line, FIELDS) for line in caplog.records if hasattr(line, FIELDS)]
    of_hits = ("hit", "hit-repaired", "repaired")
    assert [(one["event"], one["patch"]) for one in events if one["event"] in of_hits] == [
        ("hit-repaired", "bug-0"),
        ("hit-repaired", "bug-2"),
        ("repaired", "bug-0"),
        ("repaired", "bug-2"),
    ]
    assert not any(level > logging.INFO for level, _ in lines)


def test_a_hit_that_was_left_out_is_told_of_as_not_repaired(run: Any) -> None:
    lines, record, _ = run(hit(max_steps=3), skip=["bug-0"])
    assert about(lines, "bug-0") == [
        "not repaired, left out on request: bug-0 (bug: a made-up patch); your run: max_steps=3"
    ]
    assert [(one["state"], one["reason"]) for one in record["hits"]] == [("disabled", "excluded")]
    assert record["patches"] == []
    assert [level for level, line in lines if line.startswith("not repaired")] == [logging.WARNING]


def test_a_repair_that_has_acted_when_training_begins_is_said_to_have(run: Any) -> None:
    lines, _, _ = run(hit(max_steps=4), hit(max_steps=3), hit(max_steps=3))
    assert about(lines, "bug-2")[0] == "repaired: bug-2 (bug: a made-up patch); your run: max_steps=3"
    # A hit whose code was not called is told of at the end too.
    assert [line for _, line in lines if "bug-1 " in line][-1] == "bug-1 (r1) was not called: the run did not need it"


def test_a_hit_of_a_trainer_that_was_made_too_early_is_in_its_warning(
    run: Any, declare: Any, trl_like: Any, tmp_path: Path
) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()], max_steps=3)
    method = "MadeUpTrainer.prepare"
    called = [Called.CONSTRUCTION]
    declare(doubles(method), double, attribute=method, module=NAME, hits=hit(max_steps=3), called=called)
    lines, record, _ = run(made=trainer)
    by = f"a {NAME}.MadeUpTrainer was made before the patch went on"
    warning = f"made-up: unreached (made-before): {by}; this run has the bug: max_steps=3"
    assert [line for level, line in lines if level == logging.WARNING] == [warning]
    assert record["problems"] == [warning]
    assert [(one["id"], one["answer"], one["state"]) for one in record["hits"]] == [("made-up", "hit", "unreached")]


def test_nothing_is_said_where_everything_is_off(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX", "0")
    lines, record, _ = run(hit(max_steps=3))
    assert about(lines, "bug-0") == []
    assert "hits" not in record


def test_the_report_of_the_process_has_the_runs_of_trainers_that_exist(run: Any) -> None:
    before = len(api.status().runs)
    *_, trainer = run(hit(max_steps=3), hit("x", max_steps=3))
    report = trl_hotfix.status()
    assert len(report.runs) == before + 1
    (found,) = [one for one in report.runs if one.trainer.endswith("MadeUpTrainer") and len(one.hits) == 2]
    assert [(one.id, one.answer) for one in found.hits] == [("bug-0", Answer.HIT), ("bug-1", Answer.CANNOT_TELL)]
    assert report.to_dict()["runs"][-1]["hits"][0]["because"] == ["max_steps=3"]
    hitting = f"{NAME}.MadeUpTrainer hits bug-0: max_steps=3"
    assert hitting in str(report)
    assert f"<li>{hitting}</li>" in report._repr_html_()
    assert "hits bug-1" not in str(report)
    # A second training of the same trainer is the run.
    trainer.train()
    assert len(trl_hotfix.status().runs) == before + 1
    del trainer
    gc.collect()
    assert all(len(one.hits) != 2 for one in trl_hotfix.status().runs)


def test_a_second_training_is_asked_anew(run: Any, tmp_path: Path) -> None:
    *_, trainer = run(hit(max_steps=3))
    trainer.args.max_steps = 2
    trainer.train()
    assert json.loads((tmp_path / "out" / FILE).read_text())["hits"] == []


def test_a_record_with_hits_is_a_freeze_file(run: Any, tmp_path: Path) -> None:
    _, record, _ = run(hit(max_steps=3))
    frozen = freeze_files.load(str(tmp_path / "out" / FILE))
    assert [entry.id for entry in frozen.patches] == ["bug-0"]
    assert frozen.hits == record["hits"]


class Hostile:
    """What a program may hand to a trainer: it is equal to nothing, and nothing can be asked of it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked")

    def __len__(self) -> int:
        raise RuntimeError("measured")

    def __repr__(self) -> str:
        raise RuntimeError("printed")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "when", ["set", "unset", ">1", 3, "by Hostile", "not by Hostile", "text", "!=@max_steps", None]
)
def test_a_hostile_argument_ends_no_run(run: Any, when: Any, trl_like: Any, tmp_path: Path) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()], max_steps=3)
    trainer.args.__dict__["hub_token"] = Hostile()
    lines, record, _ = run(hit(hub_token=when), made=trainer)
    assert record["patches"][0]["word"] == "repaired"
    assert not [line for level, line in lines if level > logging.INFO]


def test_a_property_that_raises_is_a_doubt_of_this_bug_alone(run: Any, trl_like: Any, tmp_path: Path) -> None:
    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()], max_steps=3)

    class Config(type(trainer.args)):  # type: ignore[misc]
        @property
        def made_up(self) -> int:
            raise RuntimeError("not yet")

    trainer.args.__class__ = Config
    run(hit(made_up=1), hit(max_steps=3), made=trainer)
    found = run_hits.of(trainer, engine.ENGINE.status([trainer]))
    assert [(one.id, one.answer.value, one.unknown) for one in found] == [
        ("bug-1", "hit", ()),
        ("bug-0", "cannot tell", ("its conditions cannot be evaluated (RuntimeError)",)),
    ]


def test_no_element_of_a_tensor_or_a_dataset_is_read(run: Any, trl_like: Any, tmp_path: Path) -> None:
    import torch

    class Untouchable(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("looked into")

        def __len__(self) -> int:
            return 10**9

    class OnAGpu(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, *arguments: Any, **keywords: Any) -> Any:
            raise AssertionError(f"{function} was called")

    trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback()], max_steps=3)
    values = {"hub_token": torch.ones(2).as_subclass(OnAGpu), "hub_model_id": Untouchable(), "run_name": [[[[[1]]]]]}
    trainer.args.__dict__.update(values)
    entries = [hit(**{name: when}) for name in values for when in ("set", ">1", "by Tensor")]
    _, record, _ = run(*entries, made=trainer)
    doubts = [reason for one in record["hits"] for reason in one["unknown"] if "evaluated" in reason]
    assert doubts == []


# What is told of each state, without a run.


@pytest.mark.parametrize(
    ("state", "reason", "answer"),
    [
        (State.APPLIED, Reason.PROVEN, Answer.HIT),
        (State.OBSERVED, Reason.REPRODUCED, Answer.HIT),
        (State.FAILED, Reason.WRAPPER_ERROR, Answer.HIT),
        (State.UNREACHED, Reason.MADE_BEFORE, Answer.HIT),
        (State.UNREACHED, Reason.OVERRIDDEN, Answer.CANNOT_TELL),
        (State.SKIPPED, Reason.NOT_REPRODUCED, Answer.CANNOT_TELL),
        (State.CONFLICTED, Reason.FOREIGN_WRAPPER, Answer.CANNOT_TELL),
        (State.DISABLED, Reason.DEFAULT_OFF, Answer.HIT),
        (State.DISABLED, Reason.SWITCHED_OFF, None),
        (State.SKIPPED, Reason.ALREADY_FIXED, None),
        (State.RETIRED, Reason.FIXED_UPSTREAM, None),
        (State.PENDING, Reason.NOT_IMPORTED, None),
    ],
)
def test_a_hit_is_said_only_where_the_buggy_code_runs(
    trl_like: Any, tmp_path: Path, state: State, reason: Reason, answer: Answer | None
) -> None:
    trainer = trl_like.trainer(tmp_path / "out", max_steps=3)
    patch = replace(loading.load()[0], hits=hit(max_steps=3), trl=">=0.9", requires={})
    report = Report("0.1.0", "0.11.4", "3.11", (PatchStatus(patch, state, reason, {}, ()),))
    found = run_hits.of(trainer, report)
    assert [one.answer for one in found] == ([answer] if answer else [])


def test_the_worst_hit_comes_first(trl_like: Any, tmp_path: Path) -> None:
    trainer = trl_like.trainer(tmp_path / "out", max_steps=3)
    base = replace(loading.load()[0], trl=">=0.9", requires={})
    patches = [
        replace(base, id="doubt", hits=hit("x", max_steps=3)),
        replace(base, id="metric", hits=hit(max_steps=3), severity=Severity.WRONG_METRIC),
        replace(base, id="gradient", hits=hit(max_steps=3), severity=Severity.WRONG_GRADIENT),
    ]
    statuses = tuple(PatchStatus(patch, State.APPLIED, Reason.PROVEN, {}, ()) for patch in patches)
    found = run_hits.of(trainer, Report("0.1.0", "0.11.4", "3.11", statuses))
    assert [one.id for one in found] == ["gradient", "metric", "doubt"]
    assert run_hits.of(None, Report("0.1.0", "0.11.4", "3.11", statuses)) == ()
