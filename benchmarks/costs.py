"""Measure what each patch costs: the time of its own code, the memory that it allocates, and its share of a step.

The time is that of the patch's proof, which trains a tiny model with the real trainer, on the first place with the bug
and on the newest. How it grows is measured with batches and models of real size (``cost_cases.py``).
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Called, Patch

from benchmarks import cost_cases, measure
from benchmarks.measure import Finding, Result
from benchmarks.own_code import FIRST, ONCE, STEPS

PARAMETERS = 1e9
PEAK_FLOPS, UTILISATION = 989e12, 0.4
"""An H100 in bfloat16, and the part of it that training reaches."""
BANDWIDTH = 3.35e12
"""Bytes a second of its memory. Each byte that our code writes is read once, too."""
GOAL = 0.01

IN_STEPS = {Called.STEP, Called.SOME_STEPS, Called.DATA, Called.GENERATION}
FEW = 10
"""A look at the first parameter of a model visits a few modules. Who visits more walks the model."""

SECONDS = 3600.0
SMALL, LARGE = cost_cases.TOKENS

Spans = Sequence[Mapping[str, Any]]


class NoCaseError(Exception):
    """A patch allocates tensors or walks a model, and nothing says how that grows: add it to cost_cases.py."""


def step_seconds(tokens: int) -> float:
    """Return the estimate for a step of a dense model on a GPU: 6 FLOP a parameter and token, forward and backward.

    Our code counts in full beside it, as if the GPU waited for it.
    """
    return 6 * PARAMETERS * tokens / (UTILISATION * PEAK_FLOPS)


def in_a_micro_batch(run: Mapping[str, Any], names: set[str]) -> float | None:
    """Return the seconds of our code in a typical micro-batch in which it runs. None: it runs in none.

    ``names``: the targets that are called in steps. The first micro-batch counts only if a training has no other, and
    calls outside of a training only if there is none.
    """
    has_more = run["micro_batches"] > 2 * run["trainings"]
    by_micro_batch: dict[int, float] = defaultdict(float)
    for span in run["spans"]:
        if span["phase"] == (STEPS if has_more else FIRST):
            by_micro_batch[span["micro_batch"]] += span["seconds"]
    calls = [span["seconds"] for span in run["spans"] if span["is_target"] and span["name"] in names]
    typical = list(by_micro_batch.values()) or calls
    return statistics.median(typical) if typical else None


def once(run: Mapping[str, Any], names: set[str]) -> float | None:
    """Return the seconds of our code for each call of a target that is not called in steps."""
    spans = [span for span in run["spans"] if span["phase"] == ONCE and span["name"] not in names]
    calls = sum(span["is_target"] for span in spans)
    return sum(span["seconds"] for span in spans) / calls if calls else None


def grows(spans: Spans) -> bool:
    """Return whether our code makes tensors of more than one element, or walks the model."""
    return any(span["largest"] > 1 or span["modules"] > FEW for span in spans)


def places_of(patch: Patch) -> list[Any]:
    """Return the first place that has the bug, and the newest."""
    from bench.releases import layout

    return layout.first_and_newest(patch)


def answer(patch: Patch, place: Any, repetitions: int) -> Mapping[str, Any]:
    from bench.proving import proofs, running
    from bench.releases import layout

    layout.build([place])
    command = ["-m", "benchmarks.cost_of_patch", "{out}", str(repetitions), patch.id]
    measured = running.process(place, command, SECONDS, *proofs.settings_of(patch).get("OVERLAYS", ()))
    reasons = [run for run in ([measured] if isinstance(measured, str) else _runs(measured)) if isinstance(run, str)]
    if isinstance(measured, str) or reasons:
        raise RuntimeError(f"{patch.id} on {place}: {'; '.join(reasons)}; the log is in .bench/logs")
    return measured


def _runs(measured: Mapping[str, Any]) -> list[Any]:
    return [measured["counted"], measured["sizes"], *measured["timed"]]


def cost(patch: Patch, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a patch costs on one place. Raises ``NoCaseError``."""
    names = {target.attribute for target in patch.targets if target.called in IN_STEPS}
    spans, sizes = measured["counted"]["spans"], measured["sizes"]
    if grows(spans) and not sizes:
        raise NoCaseError(f"{patch.id} allocates tensors or walks the model: {_what(spans)}")
    by_run = [in_a_micro_batch(run, names) for run in measured["timed"]]
    seconds = [value for value in by_run if value is not None]
    onces = [value for value in (once(run, names) for run in measured["timed"]) if value is not None]
    tokens = measured["counted"]["tokens"]
    found: dict[str, Any] = {
        "micro_batch_us": [1e6 * value for value in seconds],
        "once_ms": [1e3 * value for value in onces],
        "tokens": tokens["patched"] / tokens["unpatched"] if tokens["unpatched"] else None,
    }
    if sizes:
        kind = "later" if seconds else "first"
        found["bytes"] = {str(size): sizes[f"dense, {size}"][kind]["peak"] for size in (SMALL, LARGE)}
        found["synchronisations"] = sizes[f"dense, {SMALL}"][kind]["synchronisations"]
        walks = {name.partition(",")[0]: record for name, record in sizes.items() if name.endswith(f", {SMALL}")}
        walks = {name: record for name, record in walks.items() if record["first"]["modules"] > FEW}
        found["modules"] = {name: record["model"]["modules"] for name, record in walks.items()}
        found["walk_ms"] = {
            name: {when: 1e3 * record[when]["seconds"] for when in ("first", "later")} for name, record in walks.items()
        }
        found["walks_each_time"] = sizes[f"dense, {SMALL}"]["later"]["modules"] > FEW
    if patch.id in cost_cases.NOT_ON_A_GPU:
        found["not_on_a_gpu"] = cost_cases.NOT_ON_A_GPU[patch.id]
    elif seconds:
        found["share"] = {str(size): _shares(seconds, sizes, size) for size in (SMALL, LARGE)}
        if found.get("walks_each_time"):
            walk = sizes[f"mixture, {SMALL}"]["later"]["seconds"]
            found["share_of_mixture"] = walk / step_seconds(SMALL)
    return found


def _shares(seconds: Sequence[float], sizes: Mapping[str, Any], tokens: int) -> list[float]:
    """Return the share of a step for each run."""
    if not sizes:
        return [value / step_seconds(tokens) for value in seconds]
    small, here = sizes[f"dense, {SMALL}"]["later"], sizes[f"dense, {tokens}"]["later"]
    walk = small["seconds"] if small["modules"] > FEW else 0.0
    more = max(0.0, here["seconds"] - small["seconds"]) + 2 * here["bytes"] / BANDWIDTH
    return [(max(value, walk) + more) / step_seconds(tokens) for value in seconds]


def _what(spans: Spans) -> str:
    return ", ".join(sorted({span["name"] for span in spans if grows([span])}))


def worst(costs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cost on the place where the patch takes the most, with the name of that place."""

    def weight(place: str) -> tuple[float, ...]:
        said = summary(costs[place])
        return _highest_share(said), said["micro_batch_us"] or 0.0, said["once_ms"] or 0.0

    place = max(costs, key=weight)
    return {**costs[place], "place": place}


def _highest_share(said: Mapping[str, Any]) -> float:
    return max([*said["share"].values(), said.get("share_of_mixture", 0.0)])


def _typical(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a patch: medians instead of the values of the runs."""
    shares = {size: statistics.median(values) for size, values in found.get("share", {}).items()}
    medians = {name: _typical(found[name]) for name in ("micro_batch_us", "once_ms")}
    said = {**found, **medians, "share": shares}
    return {**said, "above_goal": _highest_share(said) > GOAL}


def findings(patch_id: str, found: Mapping[str, Any]) -> list[Finding]:
    rows = []
    if found["micro_batch_us"]:
        rows.append(Finding(f"{patch_id}, a micro-batch", measure.estimate(found["micro_batch_us"]), "us"))
        for size, values in found.get("share", {}).items():
            label = f"{patch_id}, share of a step of {int(size):,} tokens"
            rows.append(Finding(label, measure.estimate(values), "", GOAL))
    if "share_of_mixture" in found:
        label = f"{patch_id}, share of a step of {SMALL:,} tokens, mixture of experts"
        rows.append(Finding(label, measure.exact(found["share_of_mixture"]), "", GOAL))
    if found["once_ms"]:
        rows.append(Finding(f"{patch_id}, once", measure.estimate(found["once_ms"]), "ms"))
    for size, allocated in found.get("bytes", {}).items():
        rows.append(Finding(f"{patch_id}, memory, {int(size):,} tokens", measure.exact(allocated / 2**20), "MiB"))
    return rows


@functools.cache
def patches() -> tuple[Patch, ...]:
    return tuple(loading.load())


def run(*, quick: bool) -> Result:
    result = Result(samples={"places": {}}, summary={"patches": {}, "failed": {}})
    failed: dict[str, str] = result.summary["failed"]
    for patch in patches():
        # A quick run looks at the first place alone.
        places = places_of(patch)[: 1 if quick else None]
        try:
            costs = {str(place): cost(patch, answer(patch, place, 1 if quick else 3)) for place in places}
        except (NoCaseError, RuntimeError) as error:
            # The figures of the other patches, which took most of an hour, would be lost.
            failed[patch.id] = str(error)
            print(f"FAILED: {error}", file=sys.stderr)
            continue
        found = worst(costs)
        result.findings += findings(patch.id, found)
        result.summary["patches"][patch.id] = summary(found)
        result.samples["places"][patch.id] = costs
    result.findings.append(Finding("patches that could not be measured", measure.exact(len(failed)), goal=0.0))
    return result
