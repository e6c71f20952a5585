"""Run inside one release: whether the self-tests of all patches leave a trace, applied or only observed.

    python -m bench.inside.traces OUT.json CASE...

A case is ``queued`` or ``initialised``, for what stands in for CUDA, and ``apply`` or ``observe``. The answer has what
changed of CUDA's queue and generators, of the generators of Python, numpy and torch, and what went to standard error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch

from bench.proving import release


def states(generators: tuple[Any, ...]) -> dict[str, str]:
    """Return everything that a seed changes, in texts that can be compared."""
    tracker = torch.cuda._lazy_seed_tracker
    return {
        "queue": repr([id(call) for call in torch.cuda._queued_calls]),
        "seeds": repr({name: id(value) if callable(value) else value for name, value in vars(tracker).items()}),
        "devices": repr([generator.get_state().tolist() for generator in generators]),
        "torch": repr(torch.get_rng_state().tolist()),
        "python": repr(random.getstate()),
        "numpy": repr(list(numpy.random.get_state())[1]),
    }


def seen(case: str) -> dict[str, Any]:
    kind, mode = case.split(", ")
    generators: tuple[Any, ...] = ()
    if kind == "initialised":
        generators = tuple(torch.Generator() for _ in range(2))
        torch.cuda.default_generators = generators
        torch.cuda.is_initialized = lambda: True
        torch.cuda.device_count = lambda: len(generators)
    torch.manual_seed(1234)
    before = states(generators)
    os.environ["TRL_HOTFIX_LOG"] = "quiet"
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        import trl_hotfix

        report = trl_hotfix.apply(observe=mode == "observe")
        sys.stderr.flush()
        os.dup2(kept, 2)
        file.seek(0)
        written = file.read().decode()
    after = states(generators)
    done = [status.id for status in report if status.state.value in ("applied", "observed")]
    return {
        "changed": [name for name in before if before[name] != after[name]],
        "written": written,
        "tests": len(done),
    }


def main(out: str, *cases: str) -> None:
    import trl

    for name in dir(trl):
        try:
            getattr(trl, name)
        except Exception:  # noqa: BLE001, S112  what this release cannot import without its extras
            continue
    answers = {case: release.alone(lambda case=case: seen(case), 300) for case in cases}  # type: ignore[misc]
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
