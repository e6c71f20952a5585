"""Wrappers and self-tests of made-up patches of ``DPOTrainer.dpo_loss``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from trl.trainer.dpo_trainer import DPOTrainer

from trl_hotfix.model import Option, Outcome, Reason, State, Verdict
from trl_hotfix.reporting.report import Report

MARK = "patched"


def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A wrapper with a visible effect: the made-up bug is that ``dpo_loss`` does not return ``MARK``."""
    return MARK


def is_marked(module: ModuleType) -> Outcome:
    trainer = object.__new__(module.DPOTrainer)
    try:
        loss = trainer.dpo_loss(1, 2, 3, 4)
    except AttributeError:
        loss = "raised"
    return Outcome(Verdict.FIXED if loss == MARK else Verdict.REPRODUCED, {"said": loss})


def pass_through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def raises(module: ModuleType) -> Outcome:
    raise RuntimeError("no idea what this release is")


def identity(report: Report, patch_id: str = "made-up") -> tuple[State, Reason]:
    return report[patch_id].state, report[patch_id].reason


def use_the_option(wrapped: Any, instance: Any, args: Any, kwargs: Any, options: Any) -> Any:
    return options["word"]


def returns_the_option(module: ModuleType, options: Any) -> Outcome:
    try:
        loss = object.__new__(module.DPOTrainer).dpo_loss(1, 2, 3, 4)
    except AttributeError:
        loss = "raised"
    return Outcome(Verdict.FIXED if loss == options["word"] else Verdict.REPRODUCED, {"said": loss})


WORDS = {"word": Option({"yes": "one way", "no": "the other"}, "yes")}


def stub_loss() -> Any:
    return object.__new__(DPOTrainer).dpo_loss(1, 2, 3, 4)
