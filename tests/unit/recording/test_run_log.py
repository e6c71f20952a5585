"""The log of a run: what it hits when it begins, what was repaired and the sum when it ends, and what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from trl_hotfix import api
from trl_hotfix.catalogue import loading
from trl_hotfix.log import FIELDS
from trl_hotfix.model import Called, Hit, KnownBug, Reason, Severity, State, Upstream
from trl_hotfix.recording import run_log
from trl_hotfix.recording.callback import HotfixCallback
from trl_hotfix.reporting.report import PatchStatus

from helpers.trl_like import NAME, doubles

INFO, WARNING = logging.INFO, logging.WARNING
STEPS = 3
HITS, CLEAN = {"max_steps": STEPS}, {"max_steps": STEPS + 1}
EVALUATED = "MadeUpTrainer.evaluated"
CAUSE = f"(bug: a made-up patch); your run: max_steps={STEPS}"


def double_losses(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) * 2


def double_ones(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Repair what the self-test does, and nothing of a run."""
    result = wrapped(*args, **kwargs)
    return result * 2 if isinstance(result, int) else result


@pytest.fixture
def train(
    declare: Any, trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Return a function that trains with a patch of the loss, and returns the log from the beginning of training on."""
    known: list[KnownBug] = []
    monkeypatch.setattr(loading, "without_repair", lambda: tuple(known))

    def declared(patch_id: str, when: Any, wrapper: Any = double_losses, depends: str | None = None) -> None:
        hits = (Hit(("MadeUp",), "it is off by 2", when, depends),)
        method = EVALUATED if patch_id == "evaluated" else "MadeUpTrainer.own_loss"
        called = [Called.EVALUATION if patch_id == "evaluated" else Called.STEP]
        declare(doubles(method), wrapper, id=patch_id, attribute=method, module=NAME, hits=hits, called=called)

    def run(*, level: int = INFO, strict: Any = False, **arguments: Any) -> list[tuple[int, str]]:
        caplog.set_level(level, logger="trl_hotfix")
        api.apply(**arguments)
        trainer = trl_like.trainer(tmp_path / "out", callbacks=[HotfixCallback(strict)], max_steps=STEPS)
        caplog.clear()
        trainer.train()
        return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "trl_hotfix"]

    run.declared, run.known = declared, known  # type: ignore[attr-defined]
    return run


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [getattr(record, FIELDS) for record in caplog.records if record.name == "trl_hotfix"]


@pytest.mark.parametrize("arguments", [{}, {"strict": True}, {"observe": True}], ids=str)
def test_a_run_that_hits_nothing_says_so(train: Any, caplog: pytest.LogCaptureFixture, arguments: Any) -> None:
    for name in ("loss", "evaluated"):
        train.declared(name, CLEAN, double_ones)
    assert train(**arguments) == [
        (INFO, "this run hits none of the 2 known bugs of TRL 0.11.4"),
        (INFO, "this run hit none of the 2 known bugs of TRL 0.11.4"),
    ]
    begin, end = fields(caplog)
    assert (begin["event"], end["event"]) == ("no-hit", "sum")
    assert begin["hit"] == end["hit"] == 0
    assert begin["others"] == 2
    assert begin["trl"] == "0.11.4"
    assert begin["digest"] == end["digest"]


def test_a_repaired_hit_is_no_alert(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    train.declared("loss", HITS)
    counts = "acted in 3 of 3 calls, in 3 of 3 steps"
    assert train() == [
        (INFO, f"repairs: loss {CAUSE}"),
        (INFO, f"repaired: loss {CAUSE}; {counts}"),
        (INFO, "this run: hit 1, repaired 1"),
    ]
    assert [one["event"] for one in fields(caplog)] == ["hit-repaired", "repaired", "sum"]
    assert fields(caplog)[-1]["repaired"] == ["loss"]


def test_a_hit_that_is_not_repaired_is_a_warning_and_in_the_sum(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    train.declared("loss", HITS)
    bug = Hit(("MadeUp",), "a symptom")
    train.known.append(KnownBug("known", "it is wrong", Severity.WRONG_LOSS, ">=0.1", Upstream(), "why", (bug,)))
    left_out, unrepairable, end = train(skip=["loss"])
    assert left_out == (WARNING, f"not repaired, left out on request: loss {CAUSE}")
    assert unrepairable[0] == WARNING
    assert unrepairable[1].startswith("known: there is no repair of it")
    assert end == (INFO, "this run: hit 2, repaired 0; not repaired 2: loss, known")
    assert [one["event"] for one in fields(caplog)] == ["hit", "hit", "sum"]


def test_a_hit_under_observe_is_a_warning_and_in_the_sum(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    train.declared("loss", HITS)
    begin, called, end = train(observe=True)
    assert begin[0] == WARNING
    assert called == (INFO, "this run has loss: it called MadeUpTrainer.own_loss 3 times")
    assert end == (INFO, "this run: hit 1, repaired 0; not repaired 1: loss")
    assert [one["event"] for one in fields(caplog)] == ["hit", "called", "sum"]


def test_a_doubt_is_named_and_is_none_of_the_bugs_that_a_run_does_not_hit(train: Any) -> None:
    train.declared("clear", CLEAN, double_ones)
    train.declared("evaluated", HITS, depends="the weather")
    assert train() == [
        (INFO, "this run hits none of 1 known bug of TRL 0.11.4; cannot tell 1 more: evaluated"),
        (INFO, "this run hit none of 1 known bug of TRL 0.11.4; cannot tell 1 more: evaluated"),
    ]


def test_a_hit_whose_repair_had_nothing_to_do_is_not_called_repaired(train: Any) -> None:
    train.declared("evaluated", HITS)
    assert train() == [
        (INFO, f"repairs: evaluated {CAUSE}"),
        (INFO, "evaluated (r1) was not called: evaluation never ran"),
        (INFO, "this run: hit 1, repaired 0; on and not acted 1: evaluated"),
    ]


def test_a_quiet_log_has_what_is_not_repaired_and_a_full_one_the_words_of_all_patches(train: Any) -> None:
    train.declared("loss", HITS)
    assert [line for _, line in train(level=WARNING, skip=["loss"])] == [
        f"not repaired, left out on request: loss {CAUSE}"
    ]
    full = [line for level, line in train(level=logging.DEBUG) if level == logging.DEBUG]
    assert full[0].startswith("training with TRL 0.11.4, digest ")


def test_the_sum_of_a_trainer_that_nobody_can_name_is_left_out(train: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(INFO, logger="trl_hotfix")
    report = api.apply()
    caplog.clear()
    run_log.begins(None, report, "training")
    run_log.ends(None, report)
    assert caplog.messages == []


def test_a_diagnosis_reports_and_does_not_repair() -> None:
    patch = replace(loading.load()[0], severity=Severity.DIAGNOSIS)
    status = PatchStatus(patch, State.DISABLED, Reason.EXCLUDED, {}, ())
    assert run_log._verb(status, {}) == (False, "not reported, left out on request")
