"""Longer runs without a patch, with it and on the fixed release, for the pictures of the losses."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import Version

from trl_hotfix.model import Patch

from bench.proving import proofs
from bench.proving.running import Answer, process
from bench.releases import layout
from bench.results import evidence

STEPS = 40
"""The length of the runs whose losses are drawn."""


def curve(patch: Patch) -> Answer | str:
    """Return the losses of longer runs on the last proven and the first fixed release, or why there are none."""
    proven = [proof for proof in evidence.load(patch.id)["proofs"] if proof["verdict"] == "proven"]
    if not proven:
        return "no proof is on record as proven"
    last = max(proven, key=lambda proof: Version(proof["release"]))
    place = evidence.place_of(last)
    settings = proofs.settings_of(patch)
    runs = {"unpatched": place, "patched": place}
    if patch.upstream.fixed_in and settings.get("PARITY"):
        fixed_places = layout.places([patch.upstream.fixed_in])
        # On the same stack if the fixed release runs on it.
        runs["fixed"] = next((fixed for fixed in fixed_places if fixed.stack == place.stack), fixed_places[0])
    answer: Answer = {"patch": patch.id, "revision": patch.revision, "stack": place.stack, "runs": {}}
    for name, run_place in runs.items():
        which = "patched" if name == "patched" else "unpatched"
        command = ["-m", "bench.proving.curves", "{out}", str(STEPS), which, patch.id]
        result = process(run_place, command, proofs.SECONDS, *proofs.overlays_of(patch, run_place))
        if isinstance(result, str):
            return f"{name}, {run_place}: {result}"
        answer["runs"][name] = {"release": run_place.release, "losses": result["losses"]}
    visible = apart(*(answer["runs"][name]["losses"] for name in ("unpatched", "patched")))
    return answer if visible else "the losses with the patch and without it look the same"


def apart(losses: Sequence[float | None], other_losses: Sequence[float | None]) -> bool:
    """Return whether two curves can be distinguished in one picture. A loss of None is not a number."""
    numbers = [loss for loss in (*losses, *other_losses) if loss is not None]
    if len(losses) != len(other_losses) or len(losses) < STEPS / 2 or not numbers:
        return False
    visible = 0.02 * (max(numbers) - min(numbers))
    return any(
        (loss is None) != (other_loss is None)
        or (loss is not None and other_loss is not None and abs(loss - other_loss) > visible)
        for loss, other_loss in zip(losses, other_losses, strict=True)
    )
