"""Add a section to the model card of a run that names the patches of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..model import State, Target
from ..patching import engine
from ..patching.wrappers import Layer
from . import run
from .failures import training_goes_on
from .trainers import calling_trainer

CARD = "trl-hotfix-model-card"
"""The layer that writes into model cards. It is not a patch: it repairs nothing, and no report names it."""


def write_into_model_cards(trainer: Any) -> None:
    """Add the section to every model card that this trainer writes from now on."""
    module: Any = sys.modules.get("trl.trainer.utils")
    target = Target("trl.trainer.utils", "generate_model_card", "in_generated_card")
    wrapper = _in_generated_card
    if not hasattr(module, target.attribute):
        # Up to TRL 0.11 a method that trainers inherit from transformers writes the card.
        trl_classes = [cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
        if not trl_classes:
            return
        module = sys.modules[trl_classes[-1].__module__]
        target = Target(module.__name__, f"{trl_classes[-1].__qualname__}.create_model_card", "in_written_card")
        wrapper = _in_written_card
    site = engine.site_registry().at(module, target)
    if site.occupied() is None and not site.has(CARD):
        site.put_on(Layer(CARD, 1, wrapper, traced=False))


def _in_generated_card(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    card = wrapped(*args, **kwargs)
    with training_goes_on("nothing is in the model card"):
        card.text = card.text.rstrip() + _section(calling_trainer())
    return card


def _in_written_card(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    with training_goes_on("nothing is in the model card"):
        if instance.is_world_process_zero():
            card = Path(instance.args.output_dir, "README.md")
            card.write_text(card.read_text(encoding="utf-8").rstrip() + _section(instance), encoding="utf-8")
    return result


def _section(trainer: Any) -> str:
    """Return what each patch was to the run of this trainer so far."""
    report = engine.ENGINE.status([trainer] if trainer is not None else None)
    lines = [
        f"- `{repair.status.id}` (revision {repair.status.patch.revision}): {_in_words(repair)}"
        for repair in run.repairs(trainer, report)
        if repair.word is not run.Word.SELECTED
    ]
    lines += [
        f"- `{status.id}` (revision {status.patch.revision}): did **not** reach this run ({status.reason.value})"
        for status in report
        if status.state is State.UNREACHED
    ]
    if not lines:
        return "\n"
    versions = f"TRL {report.trl}, trl_hotfix {report.trl_hotfix}, digest `{report.digest}`:"
    return "\n".join(["", "", "### TRL repaired at run time", "", versions, "", *lines, ""])


def _in_words(repair: run.Repair) -> str:
    if repair.word is run.Word.REPAIRED:
        return f"acted in {repair.acted} of {repair.called} calls"
    return f"called {run.times(repair.called)}, nothing to do" if repair.called else "on, and not called"
