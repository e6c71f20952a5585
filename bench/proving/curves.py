"""Run inside one release: record the losses that a longer run logs, without the patch or with it.

    python -m bench.proving.curves OUT.json STEPS patched|unpatched ID

This is the run of the patch's proof with STEPS steps. It ends when the first trainer has trained: the proof's own
judgement is skipped.
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

from trl_hotfix.catalogue import loading

from bench.proving import prove


class Trained(BaseException):
    """The first trainer has trained. Not an ``Exception``, so that no proof takes it for an error of TRL."""


def losses(train: Callable[[], Any], steps: int) -> list[float | None]:
    """Return the logged loss of each step, None where it is not finite. Raise ``ValueError`` if nothing was trained."""
    import transformers

    import tiny

    losses: list[float | None] = []
    train_of_transformers = transformers.Trainer.train

    @functools.wraps(train_of_transformers)
    def train_once(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        train_of_transformers(trainer, *args, **kwargs)
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.extend(loss if math.isfinite(loss) else None for loss in logged)
        raise Trained

    settings = {"max_steps": steps, "learning_rate": 1e-3, "optim": "adamw_torch", "logging_nan_inf_filter": False}
    tiny.state.overrides, transformers.Trainer.train = settings, train_once
    try:
        train()
    except Trained:
        return losses
    finally:
        tiny.state.overrides, transformers.Trainer.train = {}, train_of_transformers
    raise ValueError("the proof trains nothing in this process")


def main(out: str, steps: str, mode: str, patch_id: str) -> None:
    (patch,) = (patch for patch in loading.load() if patch.id == patch_id)
    proof = prove.proof_of(patch_id)
    with prove.patched(patch) if mode == "patched" else contextlib.nullcontext():
        values = losses(proof.train, int(steps))
    Path(out).write_text(json.dumps({"losses": values}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
