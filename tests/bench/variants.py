"""Run inside one release: the proofs of patches again, as other users train.

    python variants.py OUT.json SECONDS BACKEND ID...

Each proof is run red, green and red with ``torch_compile=True`` and this backend; with a LoRA adapter, if it trains the
whole model; and the whole model, if it trains adapters only. Proofs are not written for it: ``tiny`` makes models
and trainers of all of them. One whose bug does not show so, or that cannot be run so, says why:
``VARIANTS = {"lora": "..."}``; it is run all the same, and must not come out proven. A proof for which none of them
means anything says so once, ``VARIANTS = "..."``, and is not run.
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

from trl_hotfix import catalogue
from trl_hotfix.model import Patch
from trl_hotfix.verify import CellVerdict

import prove
import release


def run(patch: Patch) -> dict[str, Any]:
    """The verdict of each variant, with the losses; ``eager`` is what the proof trains by itself, patched."""
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
        seen, trained, graphs = _train(proof, variant)
        if variant in ("lora", "full") and trained != {variant}:
            raise AssertionError(f"trained {sorted(trained)}: make models and trainers with tiny, or say why not")
        if (variant == "compiled") != (graphs > 0):
            raise AssertionError(f"{graphs} graphs were compiled")
        return seen

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


def _difference(one: Any, other: Any) -> float:
    """The largest difference of the losses and of any gradient."""
    if one.gradients.keys() != other.gradients.keys() or (one.loss is None) != (other.loss is None):
        return math.inf
    of_gradients = [float((each - other.gradients[name]).abs().max()) for name, each in one.gradients.items()]
    return max([abs((one.loss or 0.0) - (other.loss or 0.0)), *of_gradients])


def _train(proof: Any, variant: str) -> tuple[Any, set[str], int]:
    """One run of the proof, what kinds of models it trained, and how many graphs were compiled."""
    import torch

    import tiny

    before = dict(os.environ)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tiny.state.trained.clear()
    tiny.state.variant = variant
    try:
        seen = proof.train()
        return seen, set(tiny.state.trained), torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        tiny.state.variant = ""
        # What is compiled when a patch goes on may hold the method as it was.
        torch._dynamo.reset()
        # accelerate is told by the environment to compile, and would go on doing so.
        for name in set(os.environ) - set(before):
            if name.startswith("ACCELERATE_"):
                del os.environ[name]


def main(out: str, seconds: str, backend: str, *ids: str) -> None:

    import tiny

    tiny.state.compiler = backend
    patches = [patch for patch in catalogue.load() if patch.id in ids]
    release.warm(patches)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        found = {patch.id: release.in_a_fork(run, patch, float(seconds)) for patch in patches}
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
