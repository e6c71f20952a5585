"""The record of a checkpoint is data that may be damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.records import RIGHT, like_a_function, records, warning_messages
from hypothesis import given
from transformers import TrainerControl, TrainerState
from trl import DPOConfig

from trl_hotfix.errors import NotAppliedError
from trl_hotfix.patching import api, engine
from trl_hotfix.recording import ranks
from trl_hotfix.recording.callback import HotfixCallback
from trl_hotfix.recording.trackers import KEY


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
    assert state.log_history[-1] == {"loss": 2.0, "step": 2, KEY: api.status().freeze()}
    assert all(message.isprintable() for message in warning_messages(caplog))
    assert not any("not complete" in message for message in warning_messages(caplog))


@pytest.mark.parametrize("record", [None, [], "x", {"patches": 3}, {**RIGHT, "run": "rm"}, {"patches": [{"id": "x"}]}])
def test_a_damaged_record_in_a_checkpoint_is_one_warning(
    record: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh_engine: engine.Engine
) -> None:
    begin(tmp_path, record)
    assert warning_messages(caplog) == ["the checkpoint's record of its repairs cannot be read; they may be other ones"]


def test_a_damaged_record_does_not_switch_strict_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine
) -> None:
    monkeypatch.setattr(ranks, "compare", lambda record: ["rank 1: no trl_hotfix is on there"])
    with pytest.raises(NotAppliedError, match="rank 1"):
        begin(tmp_path, {"patches": 3}, strict=True)
