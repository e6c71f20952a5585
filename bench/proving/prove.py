"""The proof of one patch inside one release: a tiny model is trained with the real trainer.

    python -m bench.proving.prove OUT.json GRADIENTS ID

``tests/proofs/<family>/<id with underscores>.py`` has ``train() -> TrainingResult``. In range it is run red, green and
red again; out of range, and where no module in range can be imported, once, unpatched. The gradients of each run are
saved in GRADIENTS, for parity with another release.

It can also have ``unaffected() -> TrainingResult``, a run that the bug does not hit. In range it is run without the
patch and with it, and loss and gradients must be equal, bit by bit. With ``DATA = True`` the patch must change the
fingerprints of the datasets that the trainers of ``train()`` have prepared, so that no dataset comes from a cache that
was filled without the patch; otherwise it must keep the fingerprints.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates
from trl_hotfix.model import Patch, State, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.reporting.report import Report
from trl_hotfix.verification import cells
from trl_hotfix.verification.cells import CellVerdict


def proof_of(patch_id: str) -> Any:
    """Return the module of a proof. ``tests`` is on the path, or the folder to which a wheel's proofs are unpacked."""
    return importlib.import_module(f"proofs.{modules.family_of(patch_id)}.{patch_id.replace('-', '_')}")


def red_green_red(patch: Patch, train: Callable[[], Any], *, data: bool = False) -> tuple[CellVerdict, dict[str, Any]]:
    """Return the verdict and the result of each run of the proof. ``data``: the patch changes the prepared datasets."""
    runs: dict[str, Any] = {}
    prepared: dict[str, list[str]] = {}

    def run(name: str) -> Verdict:
        fingerprints = sys.modules["tiny"].fingerprints
        fingerprints.clear()
        runs[name] = train()
        prepared[name] = list(fingerprints)
        return Verdict(runs[name].outcome.verdict)

    red = run("red")
    if gates.applicability(patch).state is not State.PENDING or not cells.runnable(gates.targets_here(patch)):
        return (CellVerdict.UNCOVERED if red is Verdict.REPRODUCED else CellVerdict.ABSENT), runs
    if red is not Verdict.REPRODUCED:
        return CellVerdict.NOT_REPRODUCED, runs
    with patched(patch):
        green = run("green")
    red_again = run("red again")
    proven = (green, red_again) == (Verdict.FIXED, Verdict.REPRODUCED)
    if proven:
        cache_key(prepared, data)
    return (CellVerdict.PROVEN if proven else CellVerdict.UNREPAIRED), runs


def cache_key(prepared: Mapping[str, Sequence[str]], data: bool) -> None:
    """Assert that the patch changes the key of the ``datasets`` cache if it changes the data, and only then."""
    red, green, red_again = (prepared[name] for name in ("red", "green", "red again"))
    assert not data or (red and red == red_again), f"the fingerprints of the data change by themselves: {prepared}"
    if red == red_again:
        # A proof may make more trainers while its patch is on.
        changed = any(before != after for before, after in zip(red, green, strict=False))
        assert changed == data, f"the patch {'does not change' if data else 'changes'} the data: {prepared}"


def undisturbed(patch: Patch, unaffected: Callable[[], Any]) -> dict[str, Any]:
    """Run what the bug does not hit, without the patch and with it. Raises ``AssertionError`` if the runs differ."""
    import torch

    before = unaffected()
    calls: Counter[str] = Counter()
    with counted(patch, calls), patched(patch):
        after = unaffected()
    assert calls, "unaffected() never comes to the patch"
    old, new = before.gradients, after.gradients
    changed = [name for name in {**old, **new} if name not in new or name not in old]
    changed += [name for name in new if name in old and not torch.equal(new[name], old[name])]
    assert old, "unaffected() has no gradients"
    difference = f"loss {before.loss!r} to {after.loss!r}, gradients {changed}"
    assert (after.loss, changed) == (before.loss, []), f"the patch changes what the bug does not hit: {difference}"
    return {"unaffected": after}


@contextlib.contextmanager
def counted(patch: Patch, calls: Counter[str]) -> Iterator[None]:
    """Count the calls of each wrapper of ``patch``."""
    module = importlib.import_module(modules.module_of(patch.id))
    before = {target.wrapper: getattr(module, target.wrapper) for target in patch.targets}

    def counting(name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wrapper)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return wrapper(*args, **kwargs)

        return call

    try:
        for name, wrapper in before.items():
            setattr(module, name, counting(name, wrapper))
        yield
    finally:
        for name, wrapper in before.items():
            setattr(module, name, wrapper)


def patched(patch: Patch) -> AbstractContextManager[Report]:
    # The bench is to prove bodies that are not on record yet.
    return engine.ENGINE.patched((patch.id,), strict=True, unknown_body="try")


def described(runs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**result.outcome.to_dict(), "loss": result.loss} for name, result in runs.items()}


def prove(patch_id: str, gradients: str) -> dict[str, Any]:
    import torch

    (patch,) = (patch for patch in loading.load() if patch.id == patch_id)
    proof = proof_of(patch_id)
    verdict, runs = red_green_red(patch, proof.train, data=getattr(proof, "DATA", False))
    torch.save({name: result.gradients for name, result in runs.items()}, gradients)
    if verdict is CellVerdict.PROVEN and hasattr(proof, "unaffected"):
        runs |= undisturbed(patch, proof.unaffected)
    return {"verdict": verdict.value, "why": "", "runs": described(runs)}


def answer(patch_id: str, gradients: str) -> dict[str, Any]:
    """Return the verdict, the reason and the runs of a proof."""
    try:
        return prove(patch_id, gradients)
    # Any exception of a trainer of an old release is a finding about that release.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"verdict": CellVerdict.ERROR.value, "why": f"{type(error).__name__}: {error}", "runs": {}}


def main(out: str, gradients: str, patch_id: str) -> None:
    Path(out).write_text(json.dumps(answer(patch_id, gradients)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
