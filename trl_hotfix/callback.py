"""What was repaired goes into the records of the run, and is the same in every rank.

``TRL_HOTFIX=1`` gives ``HotfixCallback`` to every TRL trainer, unless ``TRL_HOTFIX_CALLBACK=0``; in a script,
``trainer.add_callback(trl_hotfix.HotfixCallback())``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from . import engine, freeze, ranks
from .errors import NotAppliedError
from .install import Layer
from .log import log, speak
from .model import State, Target
from .startup import STRICT, switch

FILE = "trl_hotfix.json"
"""Beside every checkpoint. ``TRL_HOTFIX_ONLY=@trl_hotfix.json`` applies exactly what it names."""

CARD = "trl-hotfix-model-card"
"""The layer that writes into model cards. It is no patch: it repairs nothing and no report names it."""

KEY = "trl_hotfix"
"""The key in ``trainer.state.log_history``, in the config of trackers, and the title in the model card."""


def _does_not_end_the_run(event: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong with a record, training goes on; a record is one warning less, not one job less."""

    @functools.wraps(event)
    def guarded(self: HotfixCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Not for a trainer of transformers itself, which nothing of ours concerns.
        ours = any(base.__module__.startswith("trl.") for base in type(args).__mro__)
        # With the callback given by hand and by TRL_HOTFIX=1, the first of the two speaks.
        first = vars(state).setdefault("_trl_hotfix", self) is self
        if not ours or not first or self._broken:
            return
        try:
            event(self, args, state, control=control, **kwargs)
        except NotAppliedError:
            raise
        # The same border as in a wrapper: what goes wrong here must not end a run that goes on without it.
        except Exception as error:  # noqa: BLE001
            self._broken = True
            log.warning("the record of the run is not complete (%s: %s)", type(error).__name__, error)

    return guarded


class HotfixCallback(TrainerCallback):  # type: ignore[misc]
    """Puts the report into the run's records, and looks whether all ranks have the same repairs.

    At train begin: what is on goes into the log and, once, into ``state.log_history``, in its next entry; a patch that
    should be on and is not is a WARNING, as are ranks that differ from rank 0 and a checkpoint that was trained with
    other patches. Under ``TRL_HOTFIX=strict`` or ``strict=True`` the first two raise ``NotAppliedError``, on every
    rank, before the first step. Then ``trl_hotfix.json`` beside every checkpoint, the config of wandb, trackio, mlflow
    and TensorBoard where they are active, and a section in the model card.
    """

    def __init__(self, strict: bool | None = None) -> None:
        self._strict = switch(os.environ.get("TRL_HOTFIX", "")) == STRICT if strict is None else strict
        self._broken = False
        self._in_trackers = False
        self._record: dict[str, Any] | None = None

    @_does_not_end_the_run
    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        speak()
        report = engine.status()
        record = report.freeze()
        _into_model_cards()
        on = ", ".join(f"{each['id']} (r{each['revision']})" for each in record["patches"]) or "nothing"
        if state.is_world_process_zero:
            log.info("training with TRL %s, digest %s: %s", report.trl, report.digest, on)
        before = [each[KEY] for each in state.log_history if isinstance(each, dict) and KEY in each]
        if before:
            then = freeze.record(before[-1])
            if then is None:
                log.warning("the checkpoint's record of its repairs cannot be read; they may be other ones")
            for said in ranks.differences(then, record, "in the checkpoint", "now") if then is not None else ():
                log.warning("this run goes on from a checkpoint of other repairs: %s", said)
        self._record = None if before and before[-1] == record else record
        problems = [f"{each.id}: {each.state.value} ({each.reason.value})" for each in report.degraded]
        problems += ranks.compare(record)
        for problem in problems:
            log.warning("%s", problem)
        if problems and self._strict:
            raise NotAppliedError("strict mode: training does not begin:" + "".join(f"\n  {x}" for x in problems))

    @_does_not_end_the_run
    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        # Not at train begin: the trackers' own callbacks start their runs there, after this one.
        if not self._in_trackers and state.is_world_process_zero:
            self._in_trackers = True
            _into_trackers(engine.status().freeze(), args)

    @_does_not_end_the_run
    def on_log(self, args: Any, state: Any, **kwargs: Any) -> None:
        # In the entry that was just made: with one of our own, `log_history[0]["loss"]` would be an error in a script.
        if self._record is not None and state.log_history:
            state.log_history[-1][KEY] = self._record
            self._record = None

    @_does_not_end_the_run
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint from before the first entry has the record all the same, for the run that goes on from it.
        if self._record is not None and control.should_save and not control.should_log and not control.should_evaluate:
            state.log_history.append({KEY: self._record, "step": state.global_step})
            self._record = None

    on_epoch_end = on_step_end

    @_does_not_end_the_run
    def on_save(self, args: Any, state: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if state.is_world_process_zero:
            _write(folder if folder.is_dir() else Path(args.output_dir))

    @_does_not_end_the_run
    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and Path(args.output_dir).is_dir():
            _write(Path(args.output_dir))


def _write(folder: Path) -> None:
    text = json.dumps(engine.status().freeze(), indent=1) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def _into_trackers(record: Mapping[str, Any], args: Any) -> None:
    """Into the config of every tracker that has a run. Only what the run has imported is looked at."""
    for name in ("wandb", "trackio"):
        tracker: Any = sys.modules.get(name)
        # A folder named wandb, which wandb itself makes, can be imported too: as an empty package.
        config: Any = getattr(tracker, "config", None)
        if hasattr(config, "update") and name in args.report_to:
            config.update({KEY: record}, allow_val_change=True)
    mlflow: Any = sys.modules.get("mlflow")
    if "mlflow" in args.report_to and mlflow is not None and mlflow.active_run() is not None:
        mlflow.set_tag(KEY, record["digest"])
        mlflow.log_dict(record, FILE)
    if "tensorboard" in args.report_to:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None) or args.output_dir
        with SummaryWriter(log_dir=folder) as writer:
            writer.add_text(KEY, f"```json\n{json.dumps(record, indent=1)}\n```")


def _into_model_cards() -> None:
    """Have a section in every model card that TRL writes from now on. Up to 0.11 it writes none of its own."""
    utils = sys.modules.get("trl.trainer.utils")
    target = Target("trl.trainer.utils", "generate_model_card", "in_model_card")
    if utils is not None and hasattr(utils, target.attribute):
        site = engine.every_site().at(utils, target)
        if site.occupied() is None and not site.has(CARD):
            site.put_on(Layer(CARD, 1, _in_model_card, traced=False))


def _in_model_card(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    card = wrapped(*args, **kwargs)
    report = engine.status()
    lines = [f"- `{each.id}` (revision {each.patch.revision})" for each in report if each.state is State.APPLIED]
    if lines:
        what = f"TRL {report.trl}, trl_hotfix {report.trl_hotfix}, digest `{report.digest}`:"
        card.text = "\n".join([card.text.rstrip(), "", "### TRL repaired at run time", "", what, "", *lines, ""])
    return card


def add_to_every_trainer(module: ModuleType) -> None:
    """Given ``transformers.trainer``: have each trainer made from now on bring a ``HotfixCallback``."""
    if HotfixCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(HotfixCallback)
