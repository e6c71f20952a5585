"""What was repaired goes into the records of the run, and is the same in every rank.

``TRL_HOTFIX=1`` gives ``HotfixCallback`` to every TRL trainer, unless ``TRL_HOTFIX_CALLBACK=0``; in a script,
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
    """Puts the report into the run's records, and looks whether all ranks have the same repairs.

    At train begin: what is on goes into the log and, once, into ``state.log_history``, in its next entry; a patch that
    should be on and is not is a WARNING, as are ranks that differ from rank 0 and a checkpoint that was trained with
    other patches. Under ``TRL_HOTFIX=strict`` or ``strict=True`` the first two raise ``NotAppliedError``, on every
    rank, before the first step. Then ``trl_hotfix.json`` beside every checkpoint, the config of wandb, trackio, mlflow
    and TensorBoard where they are active, and a section in the model card. An evaluation without training has the log,
    the history and the trackers.
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
            speaker = self._speaker(state)
            if speaker is self:
                self._begin_training(state)
            # The other one may be the strict one.
            if speaker._problems and self._strict:
                lines = "".join(f"\n  {problem}" for problem in speaker._problems)
                raise NotAppliedError(f"strict mode: training does not begin:{lines}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The trackers' own callbacks start their runs at train begin, and do so after this one if TRL_HOTFIX=1 gave it.
        with training_goes_on("on_step_begin failed"):
            if self._speaks(args, state):
                self._into_trackers(state)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # PPO's own loop knows no beginning of a step; mlflow's run of a second `train()` starts with what it logs.
        with training_goes_on("on_log failed"):
            if self._speaks(args, state):
                self._into_trackers(state)
                self._into_history(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint from before the first entry has the record all the same, for the run that goes on from it.
        with training_goes_on("on_step_end failed"):
            trainer = self._trainer(state)
            if self._speaks(args, state) and self._record is not None and trainer is not None:
                flow = trainer.control
                if flow.should_save and not (flow.should_log or flow.should_evaluate):
                    state.log_history.append({"step": state.global_step})
                    self._into_history(state)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_evaluate failed"):
            if self._speaks(args, state):
                # Without a record it is no evaluation of a run that is trained, or the next one.
                if not _records(state):
                    self._begin("evaluating", state)
                    self._into_history(state)
                self._into_trackers(state)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_save failed"):
            if self._speaks(args, state) and state.is_world_process_zero:
                checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
                self._write(checkpoint if checkpoint.is_dir() else Path(args.output_dir), state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_train_end failed"):
            if self._speaks(args, state) and state.is_world_process_zero and Path(args.output_dir).is_dir():
                self._write(Path(args.output_dir), state)

    # Whose event it is.

    def _speaks(self, args: Any, state: Any) -> bool:
        return self._is_of_trl(args, state) and self._speaker(state) is self

    def _is_of_trl(self, args: Any, state: Any) -> bool:
        """Nothing of ours concerns a trainer of transformers itself."""
        # Either alone is not enough: the reward trainer of old releases takes plain TrainingArguments, and a trainer
        # that was generated from TRL's source is no class of TRL.
        classes = (*type(self._trainer(state)).__mro__, *type(args).__mro__)
        return any(cls.__module__.startswith("trl.") for cls in classes)

    def _speaker(self, state: Any) -> HotfixCallback:
        """With the callback given by hand and by ``TRL_HOTFIX=1``, the first of the two speaks."""
        speaker: HotfixCallback = vars(state).setdefault("_trl_hotfix", self)
        return speaker

    def _trainer(self, state: Any) -> Trainer | None:
        """Return the trainer whose state this is: looked for once, at its first event.

        To look at the variables of a function keeps what they hold, a batch for instance, until it returns.
        """
        if self._trainer_of_state is None or self._trainer_of_state[0]() is not state:
            trainer = _calling_trainer()
            self._trainer_of_state = weakref.ref(state), weakref.ref(trainer) if trainer is not None else None
        reference = self._trainer_of_state[1]
        return reference() if reference is not None else None

    # What is recorded.

    def _begin_training(self, state: Any) -> None:
        write_into_model_cards(self._trainer(state))
        report = self._begin("training", state)
        self._problems = [f"{status.id}: {status.state.value} ({status.reason.value})" for status in report.degraded]
        self._problems += ranks.compare(report.freeze())
        for problem in self._problems:
            log.warning("%s", problem)
        self._into_trackers(state)

    def _begin(self, activity: str, state: Any) -> Report:
        """Into the log and the history, and from now on into the trackers."""
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
        # In the entry that was just made: with one of our own, `log_history[0]["loss"]` would be an error in a script.
        if self._record is not None and state.log_history:
            state.log_history[-1][KEY] = self._record
            self._record = None

    def _into_trackers(self, state: Any) -> None:
        """Into each tracker of this trainer that has a run by now and does not have it yet."""
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
    """Given ``transformers.trainer``: have each trainer made from now on bring a ``HotfixCallback``."""
    if HotfixCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(HotfixCallback)


def _calling_trainer() -> Trainer | None:
    """Return the trainer whose event is being called. transformers does not tell a callback which it is."""
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
    """Warn where the checkpoint that the run goes on from was trained with other repairs."""
    before = freeze_files.record(in_checkpoint)
    if before is None:
        log.warning("the checkpoint's record of its repairs cannot be read; they may be other ones")
        return
    for difference in ranks.differences(before, record, "in the checkpoint", "now"):
        log.warning("this run goes on from a checkpoint of other repairs: %s", difference)


def _report(trainer: Trainer | None) -> Report:
    """Return where every patch stands for this trainer: not a look through all objects of the process each time."""
    return engine.ENGINE.status([trainer] if trainer is not None else None)
