"""The record is written into the active run of a tracker, and starts none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.recording.trackers import KEY, tracker_writer

RECORD = {"digest": "x", "patches": []}


def callback_of(name: str, module: str = "transformers.integrations.integration_utils") -> Any:
    return type(name, (), {"__module__": module})()


def writer_of(name: str) -> Any:
    writer = tracker_writer(callback_of(name))
    assert writer is not None
    return writer


def test_only_trackers_of_transformers_have_a_writer() -> None:
    derived = type("Mine", (type(callback_of("TensorBoardCallback")),), {})
    assert tracker_writer(derived()) is not None
    assert tracker_writer(callback_of("WandbCallback", "mine")) is None
    assert tracker_writer(callback_of("PrinterCallback")) is None


def test_wandb_gets_the_record_in_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {}
    wandb = SimpleNamespace(run=None, config=SimpleNamespace(update=lambda values, **_: config.update(values)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert not writer_of("WandbCallback")(None, RECORD)
    wandb.run = "active"
    assert writer_of("WandbCallback")(None, RECORD)
    assert config == {KEY: RECORD}


def test_mlflow_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: dict[str, Any] = {}
    mlflow = SimpleNamespace(active_run=lambda: None, set_tag=tags.__setitem__, log_dict=lambda record, file: None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert not writer_of("MLflowCallback")(None, RECORD)
    assert tags == {}
    mlflow.active_run = lambda: "active"
    assert writer_of("MLflowCallback")(None, RECORD)
    assert tags == {KEY: "x"}


def test_tensorboard_gets_the_record_as_text() -> None:
    texts: dict[str, str] = {}
    board = SimpleNamespace(add_text=texts.__setitem__, flush=lambda: None)
    assert not writer_of("TensorBoardCallback")(SimpleNamespace(tb_writer=None), RECORD)
    assert writer_of("TensorBoardCallback")(SimpleNamespace(tb_writer=board), RECORD)
    assert '"digest": "x"' in texts[KEY]


def test_mlflow_is_flushed_before_the_run_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    mlflow = SimpleNamespace(
        active_run=lambda: "active",
        set_tag=lambda key, value: calls.append("set_tag"),
        flush_async_logging=lambda: calls.append("flush_async_logging"),
        log_dict=lambda record, file: calls.append("log_dict"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert writer_of("MLflowCallback")(None, RECORD)
    assert calls == ["set_tag", "flush_async_logging", "log_dict"]
