"""Run inside one release: the proofs of patches again, in the variants of other users.

    python -m bench.proving.variants OUT.json SECONDS BACKEND ID...

Each proof is run red, green and red with ``torch_compile=True`` and this backend; with a LoRA adapter, if it trains the
whole model; and with the whole model, if it trains adapters only. Proofs need no code for this, since ``tiny`` makes
their models and trainers. If a bug does not show in a variant, or the variant cannot run, the proof states why:
``VARIANTS = {"lora": "..."}``. The variant is run all the same, and must not be proven. A proof to which no variant
applies states that once, ``VARIANTS = "..."``, and is not run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch
from trl_hotfix.verification.cells import CellVerdict

from bench.proving import prove, release


def run(patch: Patch) -> dict[str, Any]:
    """Return the verdict and the losses of each variant; ``eager`` is the patched run of the plain proof."""
    proof = prove.proof_of(patch.id)
    if isinstance(getattr(proof, "VARIANTS", {}), str):
        return {"why not": proof.VARIANTS}
    with prove.patched(patch):
        eager, trained, _ = _train(proof, "eager")
    answer: dict[str, Any] = {"eager": {"loss": eager.loss, "trained": sorted(trained)}}
    for variant in ("compiled", *sorted({"lora", "full"} - trained)):
        try:
            answer[variant] = _variant(patch, proof, variant, eager)
        # Whatever a trainer of an old release raises is a finding about that release.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer[variant] = {"verdict": CellVerdict.ERROR.value, "why": f"{type(error).__name__}: {error}"}
        answer[variant]["why not"] = getattr(proof, "VARIANTS", {}).get(variant)
    return answer


def _variant(patch: Patch, proof: Any, variant: str, eager: Any) -> dict[str, Any]:
    def train() -> Any:
        result, trained, graphs = _train(proof, variant)
        if variant in ("lora", "full") and trained != {variant}:
            raise AssertionError(f"trained {sorted(trained)}: make models and trainers with tiny, or say why not")
        if (variant == "compiled") != (graphs > 0):
            raise AssertionError(f"{graphs} graphs were compiled")
        return result

    verdict, runs = prove.red_green_red(patch, train, data=getattr(proof, "DATA", False))
    if verdict is CellVerdict.NOT_REPRODUCED:
        with prove.patched(patch):
            runs["green"] = train()
        if _difference(runs["red"], runs["green"]) == 0.0:
            verdict = CellVerdict.ABSENT
    answer: dict[str, Any] = {"verdict": verdict.value, "why": "", "runs": prove.described(runs)}
    if variant == "compiled":
        answer["difference"] = _difference(eager, runs["green"])
    return answer


def _difference(result: Any, expected: Any) -> float:
    """Return the largest difference of the losses and of any gradient."""
    if result.gradients.keys() != expected.gradients.keys() or (result.loss is None) != (expected.loss is None):
        return math.inf
    of_gradients = [
        float((gradient - expected.gradients[name]).abs().max()) for name, gradient in result.gradients.items()
    ]
    return max([abs((result.loss or 0.0) - (expected.loss or 0.0)), *of_gradients])


def _train(proof: Any, variant: str) -> tuple[Any, set[str], int]:
    """Return the result of one run of the proof, the kinds of models it trained, and the number of compiled graphs."""
    import torch

    import tiny

    environment = dict(os.environ)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tiny.state.trained.clear()
    tiny.state.variant = variant
    try:
        # Some proofs take the gradients of a loss twice.
        with torch._functorch.config.patch(donated_buffer=False):
            result = proof.train()
        return result, set(tiny.state.trained), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        tiny.state.variant = ""
        # A compiled graph may hold a method from before a patch was applied or reverted.
        torch._dynamo.reset()
        # The trainer tells accelerate by the environment to compile, which would also affect later runs.
        for name in set(os.environ) - set(environment):
            if name.startswith("ACCELERATE_"):
                del os.environ[name]


def main(out: str, seconds: str, backend: str, *ids: str) -> None:

    import tiny

    tiny.state.compiler = backend
    patches = [patch for patch in loading.load() if patch.id in ids]
    release.warm(patches)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        answers = {patch.id: release.in_a_fork(run, patch, float(seconds)) for patch in patches}
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
