"""Write the record of a run into the config of each active tracker."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

FILE = "trl_hotfix.json"
"""The file beside every checkpoint. ``TRL_HOTFIX_ONLY=@trl_hotfix.json`` applies exactly the patches in it."""

FILE_OF_RANK = "trl_hotfix.rank-{}.json"
"""The file in the output folder of a run for a rank other than 0 on which a patch failed."""


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
    # Setting a tag without an active run would start one.
    if mlflow.active_run() is None:
        return False
    # A resumed run cannot change a parameter, and a parameter holds a few hundred characters at most.
    mlflow.set_tag(KEY, record["digest"])
    # transformers logs metrics in a thread. `log_dict` reads the whole run, and fails at a metric that is half written.
    if hasattr(mlflow, "flush_async_logging"):
        mlflow.flush_async_logging()
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
    """Return the function that writes into the tracker of this callback, or None for any other callback."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _TRACKERS and cls.__module__.startswith("transformers."):
            return _TRACKERS[cls.__name__]
    return None
