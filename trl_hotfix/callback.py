"""What was repaired goes into the records of the run, and is the same in every rank.

``TRL_HOTFIX=1`` gives ``HotfixCallback`` to every TRL trainer, unless ``TRL_HOTFIX_CALLBACK=0``; in a script,
``trainer.add_callback(trl_hotfix.HotfixCallback())``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import engine, freeze, ranks
from .errors import NotAppliedError
from .install import Layer
from .log import ensure_handler, log
from .model import Report, State, Target
from .startup import STRICT, switch

FILE = "trl_hotfix.json"
"""Beside every checkpoint. ``TRL_HOTFIX_ONLY=@trl_hotfix.json`` applies exactly what it names."""

CARD = "trl-hotfix-model-card"
"""The layer that writes into model cards. It is no patch: it repairs nothing and no report names it."""

KEY = "trl_hotfix"
"""The key in ``trainer.state.log_history``, in the config of trackers, and the title in the model card."""


@contextlib.contextmanager
def _training_goes_on(without: str) -> Iterator[None]:
    """Whatever goes wrong with a record, training goes on; a record is one warning less, not one job less."""
    try:
        yield
    except NotAppliedError:
        raise
    # The same border as in a wrapper: what goes wrong here must not end a run that goes on without it.
    except Exception as error:  # noqa: BLE001
        log.warning("the record of the run is not complete, %s (%s: %s)", without, type(error).__name__, error)


def _of_trl(event: Callable[..., None]) -> Callable[..., None]:
    """Not for a trainer of transformers itself, which nothing of ours concerns."""

    @functools.wraps(event)
    def guarded(self: HotfixCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with _training_goes_on(f"{event.__name__} failed"):
            # Either alone is not enough: the reward trainer of old releases takes plain TrainingArguments, and a
            # trainer that was generated from TRL's source is no class of TRL.
            trainer = self._trainer_of(state)
            if any(each.__module__.startswith("trl.") for its in (trainer, args) for each in type(its).__mro__):
                # With the callback given by hand and by TRL_HOTFIX=1, the first of the two speaks.
                first = vars(state).setdefault("_trl_hotfix", self)
                event(self, args, state, trainer, first)

    return guarded


def _trainer() -> Trainer | None:
    """The trainer whose event this is. transformers tells a callback neither that nor who the other callbacks are."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    return None


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
        self._waiting: list[tuple[str, Callable[[], bool]]] = []
        self._record: dict[str, Any] | None = None
        self._of: tuple[weakref.ref[Any], weakref.ref[Any] | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_of": None}  # weak references cannot be pickled

    def _trainer_of(self, state: Any) -> Trainer | None:
        """The trainer whose state this is: looked for once, at its first event.

        To look at the variables of a function keeps what they hold, a batch for instance, until it returns.
        """
        if self._of is None or self._of[0]() is not state:
            trainer = _trainer()
            self._of = weakref.ref(state), weakref.ref(trainer) if trainer is not None else None
        its = self._of[1]
        return its() if its is not None else None

    @_of_trl
    def on_train_begin(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        if first is self:
            _into_model_cards(trainer)
            report = self._begin("training", state, trainer)
            self._problems = [f"{each.id}: {each.state.value} ({each.reason.value})" for each in report.degraded]
            self._problems += ranks.compare(report.freeze())
            for problem in self._problems:
                log.warning("%s", problem)
            self._into_trackers(state)
        # The other one may be the strict one.
        if first._problems and self._strict:
            said = "".join(f"\n  {problem}" for problem in first._problems)
            raise NotAppliedError(f"strict mode: training does not begin:{said}")

    @_of_trl
    def on_step_begin(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        # The trackers' own callbacks start their runs at train begin, and do so after this one if TRL_HOTFIX=1 gave it.
        if first is self:
            self._into_trackers(state)

    @_of_trl
    def on_log(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        # PPO's own loop knows no beginning of a step; mlflow's run of a second `train()` starts with what it logs.
        if first is self:
            self._into_trackers(state)
            self._into_history(state)

    @_of_trl
    def on_step_end(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        # A checkpoint from before the first entry has the record all the same, for the run that goes on from it.
        if first is self and self._record is not None and trainer is not None:
            control = trainer.control
            if control.should_save and not (control.should_log or control.should_evaluate):
                state.log_history.append({"step": state.global_step})
                self._into_history(state)

    on_epoch_end = on_step_end

    @_of_trl
    def on_evaluate(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        if first is self:
            # Else it is an evaluation of a run that is trained, or the next one.
            if not _records(state):
                self._begin("evaluating", state, trainer)
                self._into_history(state)
            self._into_trackers(state)

    on_predict = on_evaluate

    @_of_trl
    def on_save(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if first is self and state.is_world_process_zero:
            _write(folder if folder.is_dir() else Path(args.output_dir), trainer)

    @_of_trl
    def on_train_end(self, args: Any, state: Any, trainer: Any, first: HotfixCallback) -> None:
        if first is self and state.is_world_process_zero and Path(args.output_dir).is_dir():
            _write(Path(args.output_dir), trainer)

    def _begin(self, what: str, state: Any, trainer: Any) -> Report:
        """Into the log and the history, and from now on into the trackers."""
        ensure_handler()
        report = _report(trainer)
        record = report.freeze()
        on = ", ".join(f"{each['id']} (r{each['revision']})" for each in record["patches"]) or "nothing"
        if state.is_world_process_zero:
            log.info("%s with TRL %s, digest %s: %s", what, report.trl, report.digest, on)
        before = _records(state)
        if before:
            then = freeze.record(before[-1])
            if then is None:
                log.warning("the checkpoint's record of its repairs cannot be read; they may be other ones")
            for said in ranks.differences(then, record, "in the checkpoint", "now") if then is not None else ():
                log.warning("this run goes on from a checkpoint of other repairs: %s", said)
        self._record = None if before and before[-1] == record else record
        callbacks = trainer.callback_handler.callbacks if trainer is not None else []
        puts = [(each, _tracker_writer(each)) for each in callbacks]
        self._waiting = [(type(each).__name__, functools.partial(put, each, record)) for each, put in puts if put]
        return report

    def _into_history(self, state: Any) -> None:
        # In the entry that was just made: with one of our own, `log_history[0]["loss"]` would be an error in a script.
        if self._record is not None and state.log_history:
            state.log_history[-1][KEY] = self._record
            self._record = None

    def _into_trackers(self, state: Any) -> None:
        """Into each tracker of this trainer that has a run by now and does not have it yet."""
        if not self._waiting or not state.is_world_process_zero:
            return
        waiting, self._waiting = self._waiting, []
        for name, put in waiting:
            with _training_goes_on(f"{name} does not have it"):
                if not put():
                    self._waiting.append((name, put))


def _records(state: Any) -> list[Any]:
    """The records in the log history, oldest first. A checkpoint's history may hold anything."""
    return [each[KEY] for each in state.log_history if isinstance(each, dict) and KEY in each]


def _report(trainer: Trainer | None) -> Report:
    """Where every patch stands for this trainer: not a look through all objects of the process at every checkpoint."""
    return engine.ENGINE.status([trainer] if trainer is not None else None)


def _write(folder: Path, trainer: Trainer | None) -> None:
    text = json.dumps(_report(trainer).freeze(), indent=1) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


# Each is given the tracker's own callback, which has imported its package, and says whether there was a run.


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


def _tracker_writer(callback: Any) -> Callable[[Any, Mapping[str, Any]], bool] | None:
    """How to tell the tracker that this callback is of; None for every other callback."""
    for each in type(callback).__mro__:
        if each.__name__ in _TRACKERS and each.__module__.startswith("transformers."):
            return _TRACKERS[each.__name__]
    return None


def _into_model_cards(trainer: Any) -> None:
    """Have a section in every model card that this trainer writes from now on."""
    module: Any = sys.modules.get("trl.trainer.utils")
    target = Target("trl.trainer.utils", "generate_model_card", "in_generated_card")
    wrapper = _in_generated_card
    if not hasattr(module, target.attribute):
        # Up to 0.11 the cards are those of transformers, by a method that the trainers inherit.
        of_trl = [each for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
        if not of_trl:
            return
        module = sys.modules[of_trl[-1].__module__]
        target = Target(module.__name__, f"{of_trl[-1].__qualname__}.create_model_card", "in_written_card")
        wrapper = _in_written_card
    site = engine.site_registry().at(module, target)
    if site.occupied() is None and not site.has(CARD):
        site.put_on(Layer(CARD, 1, wrapper, traced=False))


def _in_generated_card(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    card = wrapped(*args, **kwargs)
    with _training_goes_on("nothing is in the model card"):
        card.text = card.text.rstrip() + _section()
    return card


def _in_written_card(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    with _training_goes_on("nothing is in the model card"):
        if instance.is_world_process_zero():
            card = Path(instance.args.output_dir, "README.md")
            card.write_text(card.read_text(encoding="utf-8").rstrip() + _section(), encoding="utf-8")
    return result


def _section() -> str:
    report = engine.status()
    lines = [f"- `{each.id}` (revision {each.patch.revision})" for each in report if each.state is State.APPLIED]
    if not lines:
        return "\n"
    what = f"TRL {report.trl}, trl_hotfix {report.trl_hotfix}, digest `{report.digest}`:"
    return "\n".join(["", "", "### TRL repaired at run time", "", what, "", *lines, ""])


def add_to_every_trainer(module: ModuleType) -> None:
    """Given ``transformers.trainer``: have each trainer made from now on bring a ``HotfixCallback``."""
    if HotfixCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(HotfixCallback)
