"""The record of a run in the config of each tracker that is active."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

FILE = "trl_hotfix.json"
"""Beside every checkpoint. ``TRL_HOTFIX_ONLY=@trl_hotfix.json`` applies exactly what it names."""


KEY = "trl_hotfix"
"""The key in ``trainer.state.log_history``, in the config of trackers, and the title in the model card."""


def _into_wandb(tracker: Any, record: Mapping[str, Any]) -> bool:
    wandb: Any = sys.modules["wandb"]
    if wandb.run is None:
        return False
    wandb.config.update({KEY: record}, allow_val_change=True)
    return True


def _into_trackio(tracker: Any, record: Mapping[str, Any]) -> bool:
    trackio: Any = sys.modules["trackio"]
    if trackio.context_vars.current_run.get() is None:
        return False
    trackio.config.update({KEY: record})
    return True


def _into_mlflow(tracker: Any, record: Mapping[str, Any]) -> bool:
    mlflow: Any = sys.modules["mlflow"]
    # Without this look, a tag would start a run.
    if mlflow.active_run() is None:
        return False
    # A parameter cannot be changed by a run that goes on, and has no room for more than a few hundred characters.
    mlflow.set_tag(KEY, record["digest"])
    mlflow.log_dict(record, FILE)
    return True


def _into_tensorboard(tracker: Any, record: Mapping[str, Any]) -> bool:
    if tracker.tb_writer is None:
        return False
    tracker.tb_writer.add_text(KEY, f"```json\n{json.dumps(record, indent=1)}\n```")
    tracker.tb_writer.flush()
    return True


_TRACKERS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "WandbCallback": _into_wandb,
    "TrackioCallback": _into_trackio,
    "MLflowCallback": _into_mlflow,
    "TensorBoardCallback": _into_tensorboard,
}


def tracker_writer(callback: Any) -> Callable[[Any, Mapping[str, Any]], bool] | None:
    """How to tell the tracker that this callback is of; None for every other callback."""
    for each in type(callback).__mro__:
        if each.__name__ in _TRACKERS and each.__module__.startswith("transformers."):
            return _TRACKERS[each.__name__]
    return None
