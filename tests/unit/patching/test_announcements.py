"""An import of a trainer is one line in the log: how many repairs are on for it."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest

from trl_hotfix import api
from trl_hotfix.log import FIELDS
from trl_hotfix.model import Hit, Outcome, Verdict

from helpers.made_up_patches import is_marked, mark
from helpers.trl_like import NAME, double, doubles

HITS = (Hit(("MadeUp",), "a symptom"),)


@pytest.fixture
def patches(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Two patches of the made-up trainer, one of a function beside it, and one of DPO."""
    caplog.set_level(logging.INFO, logger="trl_hotfix")
    attributes = {"loss": "MadeUpTrainer.own_loss", "data": "MadeUpTrainer.prepare", "scale": "scaled"}
    for name, attribute in attributes.items():
        declare(doubles(attribute), double, id=name, attribute=attribute, module=NAME, hits=HITS)
    declare(is_marked, mark, id="of-dpo", hits=(Hit(("DPO",), "a symptom"),))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(", digest ")[0] for record in caplog.records if record.name == "trl_hotfix"]


@pytest.mark.usefixtures("patches")
def test_apply_has_a_line_for_each_trainer_that_was_imported_before(
    trl_like: Any, caplog: pytest.LogCaptureFixture
) -> None:
    report = api.apply()
    assert lines(caplog) == ["3 repairs on for MadeUp", "2 repairs on for Overriding", "1 repair on for DPO"]
    assert all(record.getMessage().endswith(f", digest {report.digest}") for record in caplog.records)
    fields = {"trainer": "MadeUp", "trl": report.trl, "patches": ["data", "loss", "scale"], "digest": report.digest}
    assert getattr(caplog.records[0], FIELDS) == {"event": "repairs-on", **fields}


@pytest.mark.usefixtures("patches")
def test_a_second_apply_and_a_reload_of_the_same_repairs_add_no_line(
    trl_like: Any, caplog: pytest.LogCaptureFixture
) -> None:
    api.apply()
    caplog.clear()
    api.apply()
    importlib.reload(trl_like.module)
    assert lines(caplog) == []


@pytest.mark.usefixtures("patches")
def test_repairs_that_are_put_on_later_are_a_new_line(trl_like: Any, caplog: pytest.LogCaptureFixture) -> None:
    api.apply(only=["data"])
    api.apply(only=["data", "loss"])
    mine = [line for line in lines(caplog) if "MadeUp" in line]
    assert mine == ["1 repair on for MadeUp", "2 repairs on for MadeUp"]


@pytest.mark.usefixtures("patches")
def test_who_observes_reads_that_nothing_is_repaired(trl_like: Any, caplog: pytest.LogCaptureFixture) -> None:
    api.apply(observe=True)
    assert lines(caplog)[0] == "observing 3 known bugs of MadeUp, repairing nothing"
    assert getattr(caplog.records[0], FIELDS)["event"] == "observing"


def test_a_trainer_without_repairs_has_no_line_and_a_repair_that_fails_has_a_warning(
    declare: Any, trl_like: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trl_hotfix")
    declare(lambda module: Outcome(Verdict.REPRODUCED), double, attribute="MadeUpTrainer.own_loss", module=NAME)
    api.apply()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("made-up (r1) is NOT on: failed (self-test)")


@pytest.mark.usefixtures("patches", "trl_like")
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_another_rank_has_the_line_in_its_full_log_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    caplog.set_level(level, logger="trl_hotfix")
    monkeypatch.setenv("RANK", "1")
    api.apply()
    assert ("1 repair on for DPO" in lines(caplog)) is (level == logging.DEBUG)
