"""Write the patches that are on into the records of the run, and check that every rank has the same.

``TRL_HOTFIX=1`` gives ``HotfixCallback`` to every TRL trainer, unless ``TRL_HOTFIX_CALLBACK=0``. A script can call
``trainer.add_callback(trl_hotfix.HotfixCallback())``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import NotAppliedError
from ..log import ensure_handler, log
from ..patching import engine
from ..reporting.report import Report
from ..selection import freeze_files
from ..settings import STRICT, switch
from . import ranks
from .failures import training_goes_on
from .model_cards import write_into_model_cards
from .trackers import FILE, KEY, tracker_writer


class HotfixCallback(TrainerCallback):  # type: ignore[misc]
    """Write the report into the run's records, and check that all ranks have the same repairs.

    When training begins, the patches that are on go into the log and, once, into the next entry of
    ``state.log_history``. A patch that should be on and is not is a WARNING, as are ranks that differ from rank 0 and a
    checkpoint that was trained with other patches. Under ``TRL_HOTFIX=strict`` or ``strict=True`` the first two raise
    ``NotAppliedError``, on every rank, before the first step. The record is also written to ``trl_hotfix.json`` beside
    every checkpoint, to the config of wandb, trackio, mlflow and TensorBoard if they are active, and to a section of
    the model card. An evaluation without training has the log, the history and the trackers.
    """

    def __init__(self, strict: bool | None = None) -> None:
        self._strict = switch(os.environ.get("TRL_HOTFIX", "")) == STRICT if strict is None else strict
        self._problems: list[str] = []
        self._waiting_trackers: list[tuple[str, Callable[[], bool]]] = []
        self._record: dict[str, Any] | None = None
        self._trainer_of_state: tuple[weakref.ref[Any], weakref.ref[Any] | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer_of_state": None}  # Weak references cannot be pickled.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_train_begin failed"):
            if not self._is_of_trl(args, state):
                return
            active = self._active_callback(state)
            if active is self:
                self._begin_training(state)
            # Of two callbacks, the inactive one may be the strict one.
            if active._problems and self._strict:
                lines = "".join(f"\n  {problem}" for problem in active._problems)
                raise NotAppliedError(f"strict mode: training does not begin:{lines}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The trackers' callbacks start their runs at train begin, after this callback if TRL_HOTFIX=1 added it.
        with training_goes_on("on_step_begin failed"):
            if self._is_active(args, state):
                self._into_trackers(state)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # PPO's own loop has no step begin, and the run of mlflow in a second `train()` starts with its first log.
        with training_goes_on("on_log failed"):
            if self._is_active(args, state):
                self._into_trackers(state)
                self._into_history(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint from before the first log entry needs the record too, for the run that resumes from it.
        with training_goes_on("on_step_end failed"):
            trainer = self._trainer(state)
            if self._is_active(args, state) and self._record is not None and trainer is not None:
                next_actions = trainer.control
                if next_actions.should_save and not (next_actions.should_log or next_actions.should_evaluate):
                    state.log_history.append({"step": state.global_step})
                    self._into_history(state)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_evaluate failed"):
            if self._is_active(args, state):
                # If the history has no record, this evaluation is not part of a training run.
                if not _records(state):
                    self._begin("evaluating", state)
                    self._into_history(state)
                self._into_trackers(state)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_save failed"):
            if self._is_active(args, state) and state.is_world_process_zero:
                checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
                self._write(checkpoint if checkpoint.is_dir() else Path(args.output_dir), state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_train_end failed"):
            if self._is_active(args, state) and state.is_world_process_zero and Path(args.output_dir).is_dir():
                self._write(Path(args.output_dir), state)

    # The trainer of an event, and the active callback.

    def _is_active(self, args: Any, state: Any) -> bool:
        return self._is_of_trl(args, state) and self._active_callback(state) is self

    def _is_of_trl(self, args: Any, state: Any) -> bool:
        """Return whether the trainer is one of TRL's. The callback does nothing in a trainer of transformers itself."""
        # Both classes are looked at: the reward trainer of old releases takes plain TrainingArguments, and a trainer
        # that was generated from TRL's source is not a class of TRL.
        classes = (*type(self._trainer(state)).__mro__, *type(args).__mro__)
        return any(cls.__module__.startswith("trl.") for cls in classes)

    def _active_callback(self, state: Any) -> HotfixCallback:
        """Return the first callback of the run. There are two if a script and ``TRL_HOTFIX=1`` both add one."""
        active: HotfixCallback = vars(state).setdefault("_trl_hotfix", self)
        return active

    def _trainer(self, state: Any) -> Trainer | None:
        """Return the trainer of this state. It is looked up once, at its first event.

        Reading a frame's local variables keeps their values, such as a batch, alive until that function returns.
        """
        if self._trainer_of_state is None or self._trainer_of_state[0]() is not state:
            trainer = _calling_trainer()
            self._trainer_of_state = weakref.ref(state), weakref.ref(trainer) if trainer is not None else None
        reference = self._trainer_of_state[1]
        return reference() if reference is not None else None

    # Writing the record.

    def _begin_training(self, state: Any) -> None:
        write_into_model_cards(self._trainer(state))
        report = self._begin("training", state)
        self._problems = [f"{status.id}: {status.state.value} ({status.reason.value})" for status in report.degraded]
        self._problems += ranks.compare(report.freeze())
        for problem in self._problems:
            log.warning("%s", problem)
        self._into_trackers(state)

    def _begin(self, activity: str, state: Any) -> Report:
        """Log the report, and prepare its record for the history and the trackers."""
        ensure_handler()
        trainer = self._trainer(state)
        report = _report(trainer)
        record = report.freeze()
        on = ", ".join(f"{patch['id']} (r{patch['revision']})" for patch in record["patches"]) or "nothing"
        if state.is_world_process_zero:
            log.info("%s with TRL %s, digest %s: %s", activity, report.trl, report.digest, on)
        earlier = _records(state)
        if earlier:
            _compare_with_checkpoint(earlier[-1], record)
        self._record = None if earlier and earlier[-1] == record else record
        callbacks = trainer.callback_handler.callbacks if trainer is not None else []
        writers = [(callback, tracker_writer(callback)) for callback in callbacks]
        self._waiting_trackers = [
            (type(callback).__name__, functools.partial(write, callback, record))
            for callback, write in writers
            if write is not None
        ]
        return report

    def _into_history(self, state: Any) -> None:
        # The record goes into the newest entry. A separate entry would break `log_history[0]["loss"]` in a script.
        if self._record is not None and state.log_history:
            state.log_history[-1][KEY] = self._record
            self._record = None

    def _into_trackers(self, state: Any) -> None:
        """Write the record into each tracker that has started its run and does not have the record yet."""
        if not self._waiting_trackers or not state.is_world_process_zero:
            return
        waiting, self._waiting_trackers = self._waiting_trackers, []
        for name, write in waiting:
            with training_goes_on(f"{name} does not have it"):
                if not write():
                    self._waiting_trackers.append((name, write))

    def _write(self, folder: Path, state: Any) -> None:
        text = json.dumps(_report(self._trainer(state)).freeze(), indent=1) + "\n"
        (folder / FILE).write_text(text, encoding="utf-8")


def add_to_every_trainer(module: ModuleType) -> None:
    """Add a ``HotfixCallback`` to every trainer that is made from now on. ``module`` is ``transformers.trainer``."""
    if HotfixCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(HotfixCallback)


def _calling_trainer() -> Trainer | None:
    """Return the trainer whose event is being called. transformers does not pass it to a callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None


def _records(state: Any) -> list[Any]:
    """Return the records in the log history, oldest first. A checkpoint's history may hold anything."""
    return [entry[KEY] for entry in state.log_history if isinstance(entry, dict) and KEY in entry]


def _compare_with_checkpoint(in_checkpoint: Any, record: dict[str, Any]) -> None:
    """Warn if the checkpoint from which the run resumes was trained with other repairs."""
    before = freeze_files.record(in_checkpoint)
    if before is None:
        log.warning("the checkpoint's record of its repairs cannot be read; they may be other ones")
        return
    for difference in ranks.differences(before, record, "in the checkpoint", "now"):
        log.warning("this run goes on from a checkpoint of other repairs: %s", difference)


def _report(trainer: Trainer | None) -> Report:
    """Return the state of every patch for this trainer alone, since a search through all objects takes too long."""
    return engine.ENGINE.status([trainer] if trainer is not None else None)
