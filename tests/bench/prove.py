"""Run inside one release: the proof of one patch, a tiny model under the real trainer.

    python prove.py OUT.json GRADIENTS ID

``tests/proofs/<id with underscores>.py`` has ``train() -> Seen``. In range it is run red, green and red again; out of
range once, unpatched. The gradients of each run go to GRADIENTS, for parity with another release.

It also has ``unaffected() -> Seen``, a run that the bug does not hit. In range it is run without the patch and with it,
and loss and gradients must be the same, bit by bit. With ``DATA = True`` the patch must change the fingerprints of the
datasets that the trainers of ``train()`` have prepared, so that nothing of it comes from a cache from before; otherwise
it must leave them.
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
from trl_hotfix.verification.cells import CellVerdict

TESTS = Path(__file__).parents[1]


def proof_of(patch_id: str) -> Any:
    sys.path[:0] = [str(TESTS / "proofs"), str(TESTS)]
    return importlib.import_module(patch_id.replace("-", "_"))


def red_green_red(patch: Patch, train: Callable[[], Any], *, data: bool = False) -> tuple[CellVerdict, dict[str, Any]]:
    """The verdict, and what each run of the proof showed. ``data``: does the patch change what data are prepared?"""
    runs: dict[str, Any] = {}
    prepared: dict[str, list[str]] = {}

    def run(name: str) -> Verdict:
        fingerprints = sys.modules["tiny"].fingerprints
        fingerprints.clear()
        runs[name] = train()
        prepared[name] = list(fingerprints)
        return Verdict(runs[name].outcome.verdict)

    red = run("red")
    if gates.applicability(patch).state is not State.PENDING:
        return (CellVerdict.UNCOVERED if red is Verdict.REPRODUCED else CellVerdict.ABSENT), runs
    if red is not Verdict.REPRODUCED:
        return CellVerdict.NOT_REPRODUCED, runs
    with patched(patch):
        green = run("green")
    again = run("red again")
    proven = (green, again) == (Verdict.FIXED, Verdict.REPRODUCED)
    if proven:
        cache_key(prepared, data)
    return (CellVerdict.PROVEN if proven else CellVerdict.UNREPAIRED), runs


def cache_key(prepared: Mapping[str, Sequence[str]], data: bool) -> None:
    """Look whether the ``datasets`` cache from before the patch is taken with it, where it may be and only there."""
    red, green, again = (prepared[name] for name in ("red", "green", "red again"))
    assert not data or (red and red == again), f"the fingerprints of the data change by themselves: {prepared}"
    if red == again:
        # A proof may make more trainers where its patch is on.
        other = any(before != after for before, after in zip(red, green, strict=False))
        assert other == data, f"the patch {'does not change' if data else 'changes'} the data: {prepared}"


def undisturbed(patch: Patch, unaffected: Callable[[], Any]) -> dict[str, Any]:
    """The run that the bug does not hit, without the patch and with it. Raises ``AssertionError`` if they differ."""
    import torch

    without = unaffected()
    calls: Counter[str] = Counter()
    with counted(patch, calls), patched(patch):
        with_it = unaffected()
    assert calls, "unaffected() never comes to the patch"
    ours, theirs = with_it.gradients, without.gradients
    other = [name for name in {**theirs, **ours} if name not in ours or name not in theirs]
    other += [name for name in ours if name in theirs and not torch.equal(ours[name], theirs[name])]
    assert theirs, "unaffected() has no gradients"
    changed = f"loss {without.loss!r} to {with_it.loss!r}, gradients {other}"
    assert (with_it.loss, other) == (without.loss, []), f"the patch changes what the bug does not hit: {changed}"
    return {"unaffected": with_it}


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
    # A body that is not on record yet is what the bench is there to prove.
    return engine.ENGINE.patched((patch.id,), strict=True, unknown_body="try")


def described(runs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**seen.outcome.to_dict(), "loss": seen.loss} for name, seen in runs.items()}


def prove(patch_id: str, gradients: str) -> dict[str, Any]:
    import torch

    (patch,) = (each for each in loading.load() if each.id == patch_id)
    proof = proof_of(patch_id)
    verdict, runs = red_green_red(patch, proof.train, data=getattr(proof, "DATA", False))
    torch.save({name: seen.gradients for name, seen in runs.items()}, gradients)
    if verdict is CellVerdict.PROVEN and hasattr(proof, "unaffected"):
        runs |= undisturbed(patch, proof.unaffected)
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
