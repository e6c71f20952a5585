"""Write the patches that are on into the records of the run, and check that every rank has the same.

``TRL_HOTFIX=1`` gives ``HotfixCallback`` to every TRL trainer, unless ``TRL_HOTFIX_CALLBACK=0``. A script can call
``trainer.add_callback(trl_hotfix.HotfixCallback())``.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..log import ensure_handler, event, warning
from ..model import Reason, Strict
from ..patching import engine, reach
from ..reporting.report import Report
from ..reporting.runs import RunHit
from ..witness import event_begins, event_ends, ledger_of
from . import beginnings, effect, every_rank, observation, ranks, run, run_hits, run_log
from .agreement import STEPS_LATER, Agreed, Problem, Says, agree, ask_to_stop, stop_asked
from .failures import training_goes_on
from .files import write_atomically
from .model_cards import write_into_model_cards
from .problems import compare_with_checkpoint, not_applied, unrepaired, without_repair
from .trackers import FILE, FILE_OF_RANK, KEY, tracker_writer
from .trainers import calling_trainer

_UNCHECKED = Problem("which patches reach this trainer could not be checked; the warning before has the error")


class HotfixCallback(TrainerCallback):  # type: ignore[misc]
    """Write the report into the run's records, and check that all ranks have the same repairs.

    When training begins, the patches of this trainer and the bugs that the run hits go into the log and, once, into the
    next entry of ``state.log_history``. A WARNING each: a patch that should be on and is not, or does not reach this
    trainer; ranks that differ from rank 0; a known bug that nobody can repair; a checkpoint of other repairs. Under
    ``TRL_HOTFIX=strict`` or ``strict=True`` the first two raise ``NotAppliedError`` before the first step, if the run
    hits the bug or may hit it, and under ``strict-all`` or ``strict="all"`` in any case. So does, after the first step,
    a method that each step should call, and this one did not. All ranks raise, or none.

    The record has what each patch was to this run, with counts. The callback writes it at every save and at the end:
    in the history, in ``trl_hotfix.json`` beside every checkpoint, in the config of wandb, trackio, mlflow and
    TensorBoard if they are active; trackio keeps that of the beginning. A section of the model card has it too. At the
    end there is a line for each repair that acted. An evaluation without training has the log, the history and the
    trackers.
    """

    def __init__(self, strict: bool | Literal["all"] | None = None) -> None:
        self._strict = engine.strictness(strict) if strict is not None else None
        self._agreed = Agreed(Strict.NOTHING)
        self._broken: set[str] = set()
        self._waiting_trackers: list[tuple[str, Callable[[Mapping[str, Any]], bool]]] = []
        self._trackers: list[tuple[str, Callable[[Mapping[str, Any]], bool]]] = []
        self._is_due = False
        self._begun: dict[str, Any] = {}
        self._written: dict[str, Any] | None = None
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._number = 0
        self._trainer_of_state: tuple[weakref.ref[Any], weakref.ref[Any] | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Weak references and the objects of trackers cannot be pickled.
        return {**vars(self), "_trainer_of_state": None, "_waiting_trackers": [], "_trackers": []}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        active = self
        with training_goes_on("on_train_begin failed"):
            if not self._is_of_trl(args, state):
                return
            active = self._active_callback(state)
            if active is self:
                self._agreed = Agreed(self._level(state), (_UNCHECKED,))
                self._begin_training(args, state)
        if active is self:
            self._end_if_strict(self._agreed, "training does not begin")
            trainer = self._trainer(state)
            with training_goes_on("the effect of the repairs is not measured"):
                if trainer is not None:
                    effect.begins(trainer, f"effect/{self._number}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The trackers' callbacks start their runs at train begin, after this callback if TRL_HOTFIX=1 added it.
        with training_goes_on("on_step_begin failed"):
            if self._is_active(args, state):
                self._into_trackers(state)
                trainer = self._trainer(state)
                if trainer is not None:
                    event_begins(trainer)
                    ledger_of(trainer).run.step_begins()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # PPO's own loop has no step begin, and the run of mlflow in a second `train()` starts with its first log.
        with training_goes_on("on_log failed"):
            if self._is_active(args, state):
                self._look_after_step(state)
                self._into_trackers(state)
                self._into_history(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_step_end failed"):
            trainer = self._trainer(state)
            if not self._is_active(args, state) or trainer is None:
                return
            event_ends(trainer)
            self._look_after_step(state)
            next_actions = trainer.control
            if not next_actions.should_save:
                return
            # trainer_state.json is written before `on_save`.
            self._refresh_history(state, self._current_record(state))
            # A checkpoint from before the first log entry needs the record too, for the run that resumes from it.
            if self._is_due and not (next_actions.should_log or next_actions.should_evaluate):
                state.log_history.append({"step": state.global_step})
                self._into_history(state)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_evaluate failed"):
            if self._is_active(args, state):
                # If the history has no record, this evaluation is not part of a training run.
                if not _records(state):
                    report, _ = self._log_beginning("evaluating", state)
                    self._record_beginning("evaluating", report, state)
                    self._into_history(state)
                self._into_trackers(state)

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_save failed"):
            if self._is_active(args, state):
                record = self._record_of_all_ranks(state, "save")
                if not state.is_world_process_zero:
                    return
                checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
                _write(checkpoint if checkpoint.is_dir() else Path(args.output_dir), record)
                self._refresh_trackers(record)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with training_goes_on("on_train_end failed"):
            if not self._is_active(args, state):
                return
            effect.ends(self._trainer(state))
            record = self._record_of_all_ranks(state, "end")
            if state.is_world_process_zero:
                trainer = self._trainer(state)
                run_log.ends(trainer, _report(trainer))
                self._refresh_history(state, record)
                self._refresh_trackers(record)
                if Path(args.output_dir).is_dir():
                    _write(Path(args.output_dir), record)
            elif self._has_failed(state) and Path(args.output_dir).is_dir():
                # The record of rank 0 does not have what happened here.
                _write(Path(args.output_dir), self._current_record(state), FILE_OF_RANK.format(args.process_index))

    # The trainer of an event, and the active callback.

    def _is_active(self, args: Any, state: Any) -> bool:
        return self._is_of_trl(args, state) and self._active_callback(state) is self

    def _is_of_trl(self, args: Any, state: Any) -> bool:
        """Return whether the trainer is one of TRL's. The callback does nothing in a trainer of transformers itself."""
        # Both classes count: the reward trainer of old releases takes plain TrainingArguments, and a trainer
        # that was generated from TRL's source is not a class of TRL.
        trainer = self._trainer(state)
        classes = (*type(trainer).__mro__, *type(args).__mro__)
        if any(cls.__module__.startswith("trl.") for cls in classes):
            return True
        targets = [target for module_patch in engine.ENGINE.module_patches() for target in module_patch.targets]
        return trainer is not None and reach.looks_like_trls(
            trainer, {target.attribute.partition(".")[0] for target in targets}
        )

    def _level(self, state: Any) -> Strict:
        """Return what ends this run on this rank. Of two callbacks, the stricter one decides."""
        levels = [callback._strict for callback in [self, *_callbacks(self._trainer(state))]]
        return max(engine.ENGINE.strict if level is None else level for level in levels)

    def _active_callback(self, state: Any) -> HotfixCallback:
        """Return the first callback of the run. There are two if a script and ``TRL_HOTFIX=1`` both add one."""
        return next(iter(_callbacks(self._trainer(state))), self)

    def _trainer(self, state: Any) -> Trainer | None:
        """Return the trainer of this state, which we look up once, at its first event."""
        if self._trainer_of_state is None or self._trainer_of_state[0]() is not state:
            trainer = calling_trainer()
            self._trainer_of_state = weakref.ref(state), weakref.ref(trainer) if trainer is not None else None
        reference = self._trainer_of_state[1]
        return reference() if reference is not None else None

    # Writing the record.

    def _begin_training(self, args: Any, state: Any) -> None:
        trainer = self._trainer(state)
        ensure_handler()
        for module in engine.ENGINE.overlooked():
            warning(
                "we missed the import of %s; its patches go on now, after the trainer was made",
                module,
                extra=event("overlooked", module=module),
            )
        write_into_model_cards(trainer)
        self._number = ranks.number_of_training()
        self._first_step = self._last_step = None
        if trainer is not None:
            beginnings.note(trainer, state)
            ledger_of(trainer).begin_run()
            self._first_step = self._last_step = state.global_step
        if state.is_world_process_zero:
            with training_goes_on("that of a rank of an earlier run is still there"):
                _remove_records_of_ranks(Path(args.output_dir))
        self._broken = engine.ENGINE.broken()
        report, hits = self._log_beginning("training", state)
        level, found = self._level(state), unrepaired(report, hits if trainer is not None else None)
        found += without_repair(run_hits.without_repair(trainer, report))
        if level and engine.ENGINE.is_unused:
            found.append(Problem("nothing is applied: call trl_hotfix.apply() before the trainer is made"))
        may_hit = tuple(hit.id for hit in hits)
        says = Says(level, tuple(found), may_hit, run.frozen(trainer, report))
        try:
            self._agreed = agree(says, f"begin/{self._number}")
        finally:
            # The record has the problems, and a run whose ranks cannot be compared has a record, too.
            self._record_beginning("training", report, state)
        self._warn(self._agreed)
        self._into_trackers(state)

    def _warn(self, agreed: Agreed) -> None:
        rank, _ = ranks.rank_and_world()
        for problem in agreed.of_rank(rank):
            fields = event("hit" if problem.is_hit else "problem", patch=problem.patch, ranks=list(problem.ranks))
            warning("%s", problem.line(), extra=fields)

    def _end_if_strict(self, agreed: Agreed, what: str) -> None:
        """Raise ``NotAppliedError`` if a problem ends the run. All ranks have heard the same."""
        if agreed.ending:
            ranks.part(f"end/{self._number}")
            rank, world = ranks.rank_and_world()
            raise not_applied(agreed, what, rank, world, self._way_on(agreed.ending))

    def _way_on(self, reasons: Iterable[Problem]) -> str:
        """Return what lets the run go on all the same, to copy into the shell or into the call of ``apply()``."""
        configuration = engine.ENGINE.configuration
        ids, before = dict.fromkeys(problem.patch for problem in reasons), configuration.skipped
        if "" not in ids and before is not None:
            skipped = list(dict.fromkeys([*sorted(before), *ids]))
            return f"skip={skipped}" if "skip" in configuration.given else f"TRL_HOTFIX_SKIP={','.join(skipped)}"
        by_hand = "strict" in configuration.given or self._strict is not None
        by_variable = engine.strictness(None) is not Strict.NOTHING
        ways = [*(["TRL_HOTFIX=1"] if by_variable else []), *(["strict=False"] if by_hand or not by_variable else [])]
        return " and ".join(ways)

    def _count_step(self, state: Any) -> None:
        """Note for each patch whether the step that has ended called it, once for each step."""
        trainer = self._trainer(state)
        if trainer is None or self._last_step is None or state.global_step <= self._last_step:
            return
        self._last_step = state.global_step
        ledger = ledger_of(trainer)
        ledger.run.step_ends(ledger)

    def _look_after_step(self, state: Any) -> None:
        """Count the step. After the first, warn about each patch whose method it should have called, and has not."""
        is_first = self._first_step is not None and state.global_step > self._first_step
        level = self._agreed.level
        agreed = Agreed(level, (_UNCHECKED,) if is_first else ())
        with training_goes_on("the look after a step failed"):
            self._count_step(state)
            if is_first:
                says = Says(level, tuple(self._new_problems(state)))
                # Where nothing ends a run, no rank waits for another.
                agreed = agree(says, f"step/{self._number}") if level else Agreed(level, says.problems)
            elif level:
                agreed = Agreed(level, self._failed_since(state))
        if is_first:
            self._first_step = None
        if agreed.problems:
            self._agreed = Agreed(level, (*self._agreed.problems, *agreed.problems))
            self._warn(agreed)
            self._end_if_strict(agreed, f"training ends after step {state.global_step}")

    def _new_problems(self, state: Any) -> list[Problem]:
        trainer = self._trainer(state)
        report = _report(trainer)
        hits = run_hits.of(trainer, report) if trainer is not None else None
        found = unrepaired(report, hits, run.repairs(trainer, report))
        said = {problem.text for problem in self._agreed.problems}
        return [problem for problem in found if problem.text not in said]

    def _failed_since(self, state: Any) -> tuple[Problem, ...]:
        """Return the problems of wrappers that have failed since the beginning, as soon as all ranks can hear of them.

        With other ranks that is two steps later: none comes that far without the others.
        """
        moment, new = f"stop/{self._number}", engine.ENGINE.broken() - self._broken
        found = tuple(problem for problem in (self._new_problems(state) if new else ()) if problem.patch in new)
        self._broken |= new
        if ranks.world_size() == 1:
            return found
        if Agreed(self._agreed.level, found).ending:
            ask_to_stop(found, moment, after=state.global_step + STEPS_LATER)
        return stop_asked(moment, state.global_step)

    def _log_beginning(self, activity: str, state: Any) -> tuple[Report, tuple[RunHit, ...]]:
        """Log the report, and the bugs that the run hits, after evaluating them again."""
        ensure_handler()
        trainer = self._trainer(state)
        report = _report(trainer)
        hits = run_hits.begins(trainer, report)
        if state.is_world_process_zero:
            with training_goes_on("what it hits is not in the log"):
                run_log.begins(trainer, report, activity)
        return report, hits

    def _record_beginning(self, activity: str, report: Report, state: Any) -> None:
        """Compare the record with that of the checkpoint, and prepare it for the history and the trackers."""
        trainer = self._trainer(state)
        record = self._record(trainer, report)
        earlier = _records(state)
        if earlier:
            compare_with_checkpoint(earlier[-1], record)
        elif activity == "training" and state.global_step and record["patches"]:
            unknown = "this run goes on from a checkpoint without a record: its steps may not have been repaired"
            warning(unknown, extra=event("checkpoint"))
        self._is_due, self._begun = True, record
        callbacks = trainer.callback_handler.callbacks if trainer is not None else []
        writers = [(callback, tracker_writer(callback)) for callback in callbacks]
        self._waiting_trackers = [
            (type(callback).__name__, functools.partial(write, callback)) for callback, write in writers if write
        ]
        self._trackers = []

    def _has_failed(self, state: Any) -> bool:
        """Return whether a wrapper has failed in a call on this rank."""
        report = _report(self._trainer(state))
        return any(status.reason is Reason.WRAPPER_ERROR for status in report.degraded)

    def _refresh_history(self, state: Any, record: dict[str, Any]) -> None:
        """Bring the newest record in the history up to date, if it is one of this run."""
        for entry in reversed(state.log_history):
            if isinstance(entry, dict) and entry.get(KEY) is not None and entry[KEY] is self._written:
                entry[KEY] = self._written = record
                return

    def _refresh_trackers(self, record: Mapping[str, Any]) -> None:
        """Write the present record into the trackers that have had one."""
        for name, write in self._trackers:
            with training_goes_on(f"{name} does not have its end"):
                write(record)

    def _current_record(self, state: Any) -> dict[str, Any]:
        trainer = self._trainer(state)
        return self._record(trainer, _report(trainer))

    def _record_of_all_ranks(self, state: Any, event: str) -> dict[str, Any]:
        """Return the record, with what the patches were on every rank. Each calls it at each save and at the end."""
        # A rank without us, which the beginning has named, is not waited for.
        patiently = not any(ranks.NOTHING_THERE in problem.text for problem in self._agreed.problems)
        record = self._current_record(state)
        return every_rank.merged(record, f"{event}/{self._number}/{state.global_step}", patiently=patiently)

    def _record(self, trainer: Trainer | None, report: Report) -> dict[str, Any]:
        repairs = run.repairs(trainer, report)
        hits = run_hits.settled(run_hits.of(trainer, report), repairs)
        observed = observation.findings(trainer, report)
        # A wrapper that has failed in a call since the beginning is one more problem.
        noted = [problem.line() for problem in self._agreed.problems if problem != _UNCHECKED]
        now = [problem.line() for problem in unrepaired(report, hits, repairs)]
        in_run = [problem for repair in repairs for problem in repair.problems()]
        problems = dict.fromkeys([*noted, *now, *in_run])
        asked = run_hits.to_dicts(hits, report) if run_hits.was_asked(trainer, report) else None
        return run.record(trainer, report, observed, asked, problems)

    def _into_history(self, state: Any) -> None:
        # The record goes into the newest entry. A separate entry would break `log_history[0]["loss"]` in a script.
        if self._is_due and state.log_history:
            # A step has been taken since the beginning, and a checkpoint of this step has this entry.
            state.log_history[-1][KEY] = self._written = self._current_record(state)
            self._is_due = False

    def _into_trackers(self, state: Any) -> None:
        """Write the record into each tracker that has started its run and does not have the record yet."""
        if not self._waiting_trackers or not state.is_world_process_zero:
            return
        waiting, self._waiting_trackers = self._waiting_trackers, []
        for name, write in waiting:
            with training_goes_on(f"{name} does not have it"):
                # A tracker may never start its run, and what the run has called is not looked up at every step.
                (self._trackers if write(self._begun) else self._waiting_trackers).append((name, write))


def _write(folder: Path, record: Mapping[str, Any], name: str = FILE) -> None:
    write_atomically(folder / name, json.dumps(record, indent=1) + "\n")


def _remove_records_of_ranks(folder: Path) -> None:
    """Remove what ranks of an earlier run in this folder have left."""
    for file in folder.glob(FILE_OF_RANK.format("*")):
        file.unlink(missing_ok=True)


def add_to_those_made_already() -> None:
    """Add a ``HotfixCallback`` to every trainer of this process that lacks one."""
    for trainer in reach.all_trainers():
        if not _callbacks(trainer):
            trainer.add_callback(HotfixCallback)


def add_to_every_trainer(module: ModuleType) -> None:
    """Add a ``HotfixCallback`` to every trainer that is made from now on. ``module`` is ``transformers.trainer``."""
    if HotfixCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(HotfixCallback)


def _callbacks(trainer: Trainer | None) -> list[HotfixCallback]:
    callbacks = trainer.callback_handler.callbacks if trainer is not None else []
    return [callback for callback in callbacks if isinstance(callback, HotfixCallback)]


def _records(state: Any) -> list[Any]:
    """Return the records in the log history, oldest first. A checkpoint's history may hold anything."""
    return [entry[KEY] for entry in state.log_history if isinstance(entry, dict) and KEY in entry]


def _report(trainer: Trainer | None) -> Report:
    """Return the state of every patch for this trainer alone, since a search through all objects takes too long."""
    return engine.ENGINE.status([trainer] if trainer is not None else None)
