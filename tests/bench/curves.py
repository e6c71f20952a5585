"""Run inside one release: the losses that a longer run logs, without the patch and with it.

    python curves.py OUT.json STEPS patched|unpatched ID

It is the run of the patch's proof with as many steps as are asked for. What the proof judges is not asked here: the run
ends with the training of its first trainer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_hotfix import catalogue

import prove


class Trained(BaseException):
    """The first trainer has trained. No ``Exception``, so that no proof takes it for an answer of TRL's."""


def losses(train: Callable[[], Any], steps: int) -> list[float | None]:
    """The loss in the log at each step; None where it is no number. Raises ``ValueError`` if nothing was trained."""
    import transformers

    import tiny

    found: list[float | None] = []
    train_of_transformers = transformers.Trainer.train

    @functools.wraps(train_of_transformers)
    def train_once(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        train_of_transformers(trainer, *args, **kwargs)
        logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        found.extend(each if math.isfinite(each) else None for each in logged)
        raise Trained

    settings = {"max_steps": steps, "learning_rate": 1e-3, "optim": "adamw_torch", "logging_nan_inf_filter": False}
    tiny.state.overrides, transformers.Trainer.train = settings, train_once
    try:
        train()
    except Trained:
        return found
    finally:
        tiny.state.overrides, transformers.Trainer.train = {}, train_of_transformers
    raise ValueError("the proof trains nothing in this process")


def main(out: str, steps: str, which: str, patch_id: str) -> None:
    (patch,) = (each for each in catalogue.load() if each.id == patch_id)
    proof = prove.proof_of(patch_id)
    with prove.patched(patch) if which == "patched" else contextlib.nullcontext():
        found = losses(proof.train, int(steps))
    Path(out).write_text(json.dumps({"losses": found}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
