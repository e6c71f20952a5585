"""Run inside one release: the roll-out of one team: off, observe, `1` and strict, also where a repair cannot go on.

    python -m bench.inside.rollout OUT.json CASE...

A case is ``TRAINER PATCH SETTINGS MODE``, with ``wrapped`` behind it or without. ``SETTINGS`` are fields of the config,
as JSON without spaces. ``MODE`` is the value of ``TRL_HOTFIX``. ``wrapped``: another library has wrapped the method
first, so that the patch does not go on. Each case trains for two steps in a fork.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix import autostart
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.versions import installed

from bench.inside import trainers


def wrap_first(patch_id: str) -> None:
    """Wrap the targets of the patch, as a library that counts calls does."""
    patch = next(patch for patch in loading.load() if patch.id == patch_id)
    for target in gates.targets_for(patch, installed("trl") or ""):
        module = sys.modules.get(target.module)
        owner, _, name = target.attribute.rpartition(".")
        cls = getattr(module, owner, None)
        if cls is None or hasattr(getattr(cls, name), "counted"):
            continue
        original = getattr(cls, name)

        def counting(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        wrapped = functools.wraps(original)(counting)
        wrapped.counted = True  # type: ignore[attr-defined]
        setattr(cls, name, wrapped)


def run(case: str) -> dict[str, Any]:
    """Train, and return the length of the gradient of each step, the error of strict, and what the log says of it."""
    name, patch_id, given, mode, *wrapped = case.split(" ")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("trl_hotfix").addHandler(handler)
    if wrapped:
        wrap_first(patch_id)
    os.environ |= {"TRL_HOTFIX": mode, "TRL_HOTFIX_ONLY": patch_id}
    lengths: list[str] = []
    answer: dict[str, Any] = {"error": "", "steps": 0, "record": None}
    try:
        autostart.start()
        # TRL is imported already, so the work of its import is done now.
        trl_hotfix.status()
        plain = {"learning_rate": 0.0, "max_steps": 2, "optim": "sgd", "output_dir": "out", "save_strategy": "no"}
        trainer = trainers.TRAINERS[name](**{**plain, **json.loads(given)})
        trainers.note_gradients(trainer, lengths)
        trainer.train()
    except trl_hotfix.NotAppliedError as error:
        answer["error"] = str(error)
    if lengths and Path("out/trl_hotfix.json").exists():
        answer["record"] = json.loads(Path("out/trl_hotfix.json").read_text(encoding="utf-8"))
    warnings = [line for line in said if line.startswith("WARNING") and patch_id in line]
    return {**answer, "gradients": lengths, "warnings": warnings}


if __name__ == "__main__":
    trainers.answer_each(run, *sys.argv[1:])
