"""Run inside one release: the proof of one patch, a tiny model under the real trainer.

    python prove.py OUT.json GRADIENTS ID

``tests/patches/<id with underscores>.py`` has ``train() -> Seen``. In range it is run red, green and red again; out of
range once, unpatched. The gradients of each run go to GRADIENTS, for parity with another release.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trl_hotfix import catalogue, engine, gates
from trl_hotfix.model import Patch, Report, State, Verdict
from trl_hotfix.verify import CellVerdict

PATCHES = Path(__file__).parents[1] / "patches"


def proof_of(patch_id: str) -> Any:
    sys.path.insert(0, str(PATCHES))
    return importlib.import_module(patch_id.replace("-", "_"))


def red_green_red(patch: Patch, train: Callable[[], Any]) -> tuple[CellVerdict, dict[str, Any]]:
    """The verdict, and what each run of the proof showed."""
    runs: dict[str, Any] = {}

    def run(name: str) -> Verdict:
        runs[name] = train()
        return Verdict(runs[name].outcome.verdict)

    red = run("red")
    if gates.fits(patch).state is not State.PENDING:
        return (CellVerdict.UNCOVERED if red is Verdict.REPRODUCED else CellVerdict.ABSENT), runs
    if red is not Verdict.REPRODUCED:
        return CellVerdict.NOT_REPRODUCED, runs
    with patched(patch):
        green = run("green")
    again = run("red again")
    proven = (green, again) == (Verdict.FIXED, Verdict.REPRODUCED)
    return (CellVerdict.PROVEN if proven else CellVerdict.UNREPAIRED), runs


def patched(patch: Patch) -> AbstractContextManager[Report]:
    # A body that is not on record yet is what the bench is there to prove.
    return engine.ENGINE.patched((patch.id,), strict=True, unknown_body="try")


def described(runs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**seen.outcome.to_dict(), "loss": seen.loss} for name, seen in runs.items()}


def prove(patch_id: str, gradients: str) -> dict[str, Any]:
    import torch

    (patch,) = (each for each in catalogue.load() if each.id == patch_id)
    verdict, runs = red_green_red(patch, proof_of(patch_id).train)
    torch.save({name: seen.gradients for name, seen in runs.items()}, gradients)
    return {"verdict": verdict.value, "why": "", "runs": described(runs)}


def main(out: str, gradients: str, patch_id: str) -> None:
    try:
        answer = prove(patch_id, gradients)
    # Whatever a trainer of an old release raises is a finding about that release.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        answer = {"verdict": CellVerdict.ERROR.value, "why": f"{type(error).__name__}: {error}", "runs": {}}
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
