"""Condense ``evidence/<id>.json`` to what the package reads: the bodies of all targets, what is proven, the trainings.

A checkout has no such files, they are condensed in memory: a new patch is a new file of evidence and changes no other.
For a wheel ``data/build_hook.py`` writes them. It loads this module alone, without the libraries of the package.
``evidence_file`` reads its input.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packaging.version import Version

_PARITY = ("release", "stack", "fixed_release", "loss_difference", "gradient_difference")


def condensed(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``{"fingerprints.json": ..., "proven.json": ...}`` for the evidence of these patches."""
    releases: set[str] = set()
    targets: dict[str, dict[str, dict[str, Any]]] = {}
    inherited: dict[str, dict[str, Any]] = {}
    proven: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: str(record["patch"])):
        patch_id = record["patch"]
        releases.update(record["releases"])
        proven[patch_id] = {"revision": record["revision"], "releases": record["proven"]}
        for target, by_body in record["bodies"].items():
            for body, known in by_body.items():
                merged = targets.setdefault(target, {}).setdefault(body, {"releases": set(), "is": {}})
                merged["releases"].update(known["releases"])
                if "is" in known:
                    merged["is"][patch_id] = known["is"]
        for target, known in record["inherited"].items():
            merged = inherited.setdefault(target, {"of": known["of"], "by": set(), "is": {}})
            merged["by"].update(known["by"])
            for body, verdict in known["is"].items():
                merged["is"].setdefault(body, {})[patch_id] = verdict
    version = functools.cache(Version)
    for merged in (body for by_body in targets.values() for body in by_body.values()):
        merged["releases"] = sorted(merged["releases"], key=version)
    for merged in inherited.values():
        merged["by"] = sorted(merged["by"], key=version)
    fingerprints: dict[str, Any] = {"releases": sorted(releases, key=version), "targets": dict(sorted(targets.items()))}
    if inherited:
        fingerprints["inherited"] = dict(sorted(inherited.items()))
    return {"fingerprints.json": fingerprints, "proven.json": proven}


def trainings(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``trainings.json``: by patch what ``explain`` shows of its proofs and of the comparisons with a fix."""
    return {
        record["patch"]: {
            "revision": record["revision"],
            "results": _results(record["proofs"]),
            "parity": [{key: parity[key] for key in _PARITY} for parity in record["parity"]],
        }
        for record in records
    }


def _results(proofs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each distinct result of these proofs once, with the releases that have it by stack.

    Many releases have the same numbers to the last digit. ``on_record`` makes the proofs of them again.
    """
    results: dict[str, dict[str, Any]] = {}
    for proof in proofs:
        result = {"verdict": proof["verdict"], "runs": proof["runs"]}
        # The keys keep their order, in which `explain` shows the runs and their numbers.
        known = results.setdefault(json.dumps(result), {**result, "places": {}})
        known["places"].setdefault(proof["stack"], []).append(proof["release"])
    return list(results.values())


def files(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of each file that an installed package has in ``data/`` and a checkout has not."""
    return {**condensed(records), "trainings.json": trainings(records)}
