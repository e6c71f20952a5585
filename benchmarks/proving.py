"""Measure what it takes to prove patches: the seconds of a self-test and of a proof, and how many there are."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch

from bench.proving import cells, proofs, running
from bench.releases import layout
from bench.releases.layout import Place
from bench.results import evidence
from benchmarks import measure
from benchmarks.measure import Finding, Result

RELEASES = ("0.11.4", "0.22.2", "1.16.0")
LIMIT = 600.0
CELLS, PROOFS = 10, 4
"""How many are run in one process. The same process with one of them shows what the others take."""


def affected(place: Place, count: int) -> list[Patch]:
    """Return ``count`` patches, spread over the catalogue, whose bug a place has and that need no other overlay."""
    there = [patch for patch in loading.load() if place.targets_of(patch) and not proofs.overlays_of(patch, place)]
    if len(there) < count:
        raise ValueError(f"{place} has {len(there)} patches without overlays, and {count} are to be measured")
    return there[:: len(there) // count][:count]


def self_tests(place: Place, patches: Sequence[Patch]) -> measure.Sample:
    ids = [patch.id for patch in patches]
    return _sample(place, ["-m", "bench.proving.release", "{out}", str(cells.SECONDS), *ids])


def trainings(place: Place, patches: Sequence[Patch]) -> measure.Sample:
    with tempfile.TemporaryDirectory() as folder:
        gradients = [f"{patch.id}={Path(folder, patch.id)}" for patch in patches]
        return _sample(place, ["-m", "bench.proving.prove_several", "{out}", str(proofs.SECONDS), *gradients])


def _sample(place: Place, arguments: list[str]) -> measure.Sample:
    begin = time.perf_counter()
    answer = running.process(place, arguments, LIMIT)
    if isinstance(answer, str):
        raise RuntimeError(f"{arguments[1]} on {place}: {answer}")
    return {"seconds": time.perf_counter() - begin}


def counts() -> dict[str, float]:
    """Return how much of everything is on record."""
    patches = loading.load()
    records = [evidence.load(patch.id) for patch in patches]
    newest = layout.releases()[-1]
    runs = [len({(cell["stack"], cell["ran"]) for cell in record["cells"]}) for record in records]
    return {
        "patches": len(patches),
        "releases": len(layout.releases()),
        "places": len(layout.places()),
        "cells": sum(len(record["cells"]) for record in records),
        "runs of a patch": statistics.mean(runs),
        "proofs of a patch": statistics.mean(len(record["proofs"]) for record in records),
        "proofs of the newest": sum(proof["release"] == newest for record in records for proof in record["proofs"]),
    }


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": ", ".join(RELEASES)}, summary=counts())
    for release in RELEASES:
        place = layout.main_place(release)
        layout.build([place])
        patches = affected(place, CELLS)
        variants: dict[str, Callable[[], measure.Sample]] = {
            "one cell": functools.partial(self_tests, place, patches[:1]),
            "cells": functools.partial(self_tests, place, patches),
            "one proof": functools.partial(trainings, place, patches[:1]),
            "proofs": functools.partial(trainings, place, patches[:PROOFS]),
        }
        rounds = measure.run_rounds(variants, 1 if quick else 3, warm_up=False)
        result.samples[release] = measure.as_plain_data(rounds)
        each_cell = [(one["cells"]["seconds"] - one["one cell"]["seconds"]) / (CELLS - 1) for one in rounds]
        each_proof = [(one["proofs"]["seconds"] - one["one proof"]["seconds"]) / (PROOFS - 1) for one in rounds]
        start = [one["one cell"]["seconds"] - cell for one, cell in zip(rounds, each_cell, strict=True)]
        for what, values in (("the start of a process", start), ("a cell", each_cell), ("a proof", each_proof)):
            result.findings.append(Finding(f"TRL {release}: {what}", measure.estimate(values), "s"))
    return result
