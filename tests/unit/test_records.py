"""Records that come from somewhere else, a checkpoint or another rank, are data that may be damaged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState
from trl import DPOConfig

from trl_hotfix.errors import NotAppliedError
from trl_hotfix.patching import api, engine
from trl_hotfix.recording import ranks
from trl_hotfix.recording.callback import HotfixCallback
from trl_hotfix.recording.trackers import KEY

RIGHT = {"trl": "0.11.4", "patches": [{"id": "some-patch", "revision": 1, "options": {"over": "all"}}]}
NOTHING: dict[str, Any] = {"trl": "0.11.4", "patches": []}
ODD = "a\nb\x1b[31m"

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.just("some-patch"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["trl", "patches", "id", "revision", "options", "over"]), inner)
    ),
    max_leaves=8,
)
records = json_values | json_values.map(lambda patches: {**RIGHT, "patches": patches})
like_a_function = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def begin(folder: Path, record: Any, *, strict: bool = False) -> Any:
    """A training run that goes on from a checkpoint with this record, up to its first entry in the history."""
    state = TrainerState(log_history=[3, {"loss": 1.0}, {KEY: record, "step": 1}], is_world_process_zero=True)
    callback, args = HotfixCallback(strict), DPOConfig(output_dir=str(folder), report_to="none")
    callback.on_train_begin(args, state, TrainerControl())
    state.log_history.append({"loss": 2.0, "step": 2})
    callback.on_log(args, state, TrainerControl())
    return state


def warning_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message.getMessage() for message in caplog.records if message.levelno >= logging.WARNING]


@like_a_function
@given(record=records)
def test_whatever_a_checkpoint_has_on_record_the_run_goes_on_with_what_is_on_now(
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


def test_a_damaged_record_in_a_checkpoint_does_not_switch_strict_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_engine: engine.Engine
) -> None:
    monkeypatch.setattr(ranks, "compare", lambda record: ["rank 1: no trl_hotfix is on there"])
    with pytest.raises(NotAppliedError, match="rank 1"):
        begin(tmp_path, {"patches": 3}, strict=True)


def test_what_a_checkpoint_names_is_shown_fit_for_a_terminal() -> None:
    record = {"trl": ODD, "patches": [{"id": ODD, "revision": 1, "options": {ODD: ODD}}]}
    lines = ranks.differences(record, NOTHING, "in the checkpoint", "now")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_the_difference_to_a_checkpoint_is_still_said() -> None:
    assert ranks.differences(RIGHT, NOTHING, "then", "now") == ["some-patch is r1 over=all then, not on now"]


# Other ranks


def collected(answer: bytes) -> list[str]:
    from torch.distributed import HashStore

    store = HashStore()
    store.set("1", answer)
    return ranks._collected(store, RIGHT, 2, 0.0)


@like_a_function
@given(answer=st.binary(max_size=40) | records.map(lambda line: json.dumps(line).encode()))
def test_whatever_another_rank_answers_it_is_the_same_or_named(answer: bytes) -> None:
    differences = collected(answer)
    assert all(line.startswith("rank 1: ") and line.isprintable() for line in differences)


@pytest.mark.parametrize("answer", [b"", b"\xff", b"{", b"3", b"[" * 100_000, b'{"patches": [{}]}'])
def test_a_rank_whose_record_cannot_be_read_is_named(answer: bytes) -> None:
    assert collected(answer) == ["rank 1: its record cannot be read"]


def test_a_rank_with_the_same_record_is_not_named() -> None:
    assert collected(json.dumps(RIGHT).encode()) == []


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "soon", "1e999", "6 0", "\n\x1b[31m"])
def test_a_patience_that_is_no_number_of_seconds_is_one_warning_and_never_endless(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", value)
    assert ranks._patience() == ranks.RANK_TIMEOUT
    assert warning_messages(caplog) == [f"TRL_HOTFIX_PATIENCE is {value!r}, not a number of seconds; taken as 60"]


@pytest.mark.parametrize(("value", "seconds"), [("", 60.0), ("0", 0.0), ("2", 2.0), (" 1.5 ", 1.5)])
def test_a_patience_is_seconds(value: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX_PATIENCE", value)
    assert ranks._patience() == seconds
