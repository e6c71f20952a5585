"""Run inside one release: what ``TRL_HOTFIX_EFFECT`` measures in a run, beside runs with a repair and without it.

    python -m bench.inside.effects OUT.json CASE.json

A case has the name of a trainer of ``relations.trainers``, the id of the repair, and the fields of its setting. Each
run is a fork. The answer has the effect of the record, the same numbers from two runs, and what differs between the
runs that measure it and those that do not.
"""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_hotfix import api
from trl_hotfix.recording.trackers import FILE
from trl_hotfix.relations import inside
from trl_hotfix.relations.run import Run, run
from trl_hotfix.relations.setting import Setting
from trl_hotfix.relations.trainers import RECIPES


def main(out: str, case_file: str) -> None:
    inside.prepare()
    case = json.loads(Path(case_file).read_text(encoding="utf-8"))
    setting = Setting(**{"batch_size": 4, "accumulation": 2, **case["setting"]})

    def trained(**how: Any) -> tuple[Run, dict[str, Any]]:
        return in_fork(lambda folder: _trained(case["trainer"], setting, folder, **how))

    patch_id = case["patch"]
    (right, _), (measured, record) = trained(), trained(measure_effect=True)
    (wrong, _) = trained(skip=[patch_id])
    entry = next(entry for entry in record["patches"] if entry["id"] == patch_id)
    answer = {
        "effect": entry["effect"],
        "expected": expected(right, wrong),
        "differ": list(differences(right, measured)),
    }
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


def _trained(trainer: str, setting: Setting, folder: Path, **how: Any) -> tuple[Run, dict[str, Any]]:
    api.apply(**how)
    made = run(RECIPES[trainer].make, setting, folder / "run")
    record = folder / "run" / FILE
    return made, json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}


def in_fork(task: Callable[[Path], Any]) -> Any:
    """Return what ``task`` returns in a fork of this process. Raises ``RuntimeError`` if it raises."""
    import torch

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            buffer = io.BytesIO()
            torch.save(task(Path(folder)), buffer)
            sender.send_bytes(buffer.getvalue())

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        content = receiver.recv_bytes()
    except EOFError:
        raise RuntimeError("a run ended with an error, which its log has") from None
    finally:
        process.join()
    return torch.load(io.BytesIO(content), weights_only=False)


def expected(right: Run, wrong: Run) -> dict[str, float]:
    """Return the numbers of the effect from the first gradients, and the logged loss, of two runs."""
    with_, without = right.gradients[0], wrong.gradients[0]
    names = sorted(with_.keys() & without.keys())
    product = sum(float(with_[name].double().flatten().dot(without[name].double().flatten())) for name in names)
    norms = [math.sqrt(sum(float((one.double() ** 2).sum()) for one in each.values())) for each in (with_, without)]
    return {
        "loss": right.logs[0]["loss"],
        "loss_without": wrong.logs[0]["loss"],
        "gradient_norm": norms[0],
        "gradient_norm_without": norms[1],
        "cosine": product / (norms[0] * norms[1]),
    }


def differences(one: Run, other: Run) -> Iterator[str]:
    """Yield what two runs do not have bit by bit in common."""
    for step, (first, second) in enumerate(zip(one.gradients, other.gradients, strict=True), 1):
        yield from (f"step {step}: {name}" for name in _unequal(first, second))
    yield from _unequal(one.weights, other.weights)
    # As text, since what is not a number equals nothing.
    yield from (f"logs: {a}, {b}" for a, b in zip(one.logs, other.logs, strict=True) if repr(a) != repr(b))
    yield from (name for name in one.random if one.random[name] != other.random[name])


def _unequal(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [name for name in first.keys() | second.keys() if not bool((first[name] == second[name]).all())]


if __name__ == "__main__":
    main(*sys.argv[1:])
