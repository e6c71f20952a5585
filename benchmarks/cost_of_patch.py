"""Run inside one release: what the code of one patch takes, while its proof trains and with inputs of real size.

    python -m benchmarks.cost_of_patch OUT.json REPETITIONS ID

TRL is imported once. Each run is in a fork of that process: one that counts tensors and modules, the timed ones, in
which nothing is counted, and one of the cases.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates
from trl_hotfix.model import Patch, Verdict

from bench.proving import prove, release
from benchmarks import cost_cases, own_code

SECONDS = 240.0
"""The limit for a run."""


def train(patch: Patch, proof: Any, *, warm: bool = False) -> dict[str, Any]:
    """Return the spans of our code in the proof, with the patch on.

    ``warm``: where each training has one micro-batch, the proof runs twice, since the first call of all takes longer.
    """
    with prove.patched(patch):
        own_code.leave_out_trl([sys.modules[target.module] for target in gates.targets_here(patch)])
        clock = own_code.CLOCK
        clock.reset()
        once(proof, Verdict.FIXED)
        if warm and clock.micro_batch <= 2 * clock.trainings:
            clock.reset()
            once(proof, Verdict.FIXED)
        spans = [dataclasses.asdict(span) for span in clock.spans]
        return {"spans": spans, "micro_batches": clock.micro_batch, "trainings": clock.trainings}


def once(proof: Any, expected: Verdict) -> None:
    """Run the proof. Raises ``AssertionError`` if the verdict is another than without what is measured."""
    sys.modules["tiny"].fingerprints.clear()
    verdict = Verdict(proof.train().outcome.verdict)
    assert verdict is expected, f"the proof says {verdict.value}: expected {expected.value}"


def timed(patch: Patch, proof: Any) -> dict[str, Any]:
    own_code.leave_out_libraries()
    own_code.follow_the_training()
    return train(patch, proof, warm=True)


def counted(patch: Patch, proof: Any) -> dict[str, Any]:
    """Return the spans with what they allocate and visit, and the tokens that models are given without and with it."""
    own_code.leave_out_libraries()
    own_code.follow_the_training()
    clock, unpatched, patched = own_code.CLOCK, own_code.Tokens(), own_code.Tokens()
    clock.reset()
    with unpatched.counted():
        once(proof, Verdict.REPRODUCED)
    trainings, ended = clock.trainings, clock.ended
    with own_code.counted_modules(), own_code.counted_tensors(), patched.counted():
        trained = train(patch, proof)
    # Without the patch a training may end early, by an error, and later ones are left out.
    comparable = {number for number in ended & clock.ended if number == 1 or trainings == clock.trainings}
    both = {key for key in unpatched.by_micro_batch.keys() & patched.by_micro_batch.keys() if key[0] in comparable}
    tokens = {"unpatched": unpatched, "patched": patched}
    given = {name: sum(counts.by_micro_batch[key] for key in both) for name, counts in tokens.items()}
    return {**trained, "tokens": given}


def of_size(patch: Patch) -> dict[str, Any]:
    own_code.leave_out_libraries()
    return cost_cases.measured(patch.id, importlib.import_module(modules.module_of(patch.id)))


def main(out: str, repetitions: str, patch_id: str) -> None:
    own_code.install()
    import tiny  # noqa: F401  imported before the forks

    (patch,) = (patch for patch in loading.load() if patch.id == patch_id)
    release.warm([patch])
    proof = prove.proof_of(patch_id)
    runs: dict[str, Any] = {"counted": release.alone(lambda: counted(patch, proof), SECONDS)}
    runs["sizes"] = release.alone(lambda: of_size(patch), SECONDS)
    runs["timed"] = [release.alone(lambda: timed(patch, proof), SECONDS) for _ in range(int(repetitions))]
    Path(out).write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
