"""The proofs of patches with real trainers: where they are run, their results, and parity with the fixed release."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from trl_hotfix.matching import digests, gates, inherited
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Patch

from bench.proving.running import Answer, Case, in_parallel, is_kept, process
from bench.releases import layout, trl_code
from bench.releases.layout import BENCH, CHECKOUT, Place
from bench.results import evidence, keys

SECONDS = 300.0
"""The limit for one proof."""


class NoProofError(Exception):
    """A patch has no proof."""


def settings_of(patch: Patch) -> Mapping[str, Any]:
    """Return what a proof states, and whether it has a run ``unaffected``.

    It can state ``OVERLAYS``, ``PARITY``, ``VARIANTS``, ``EQUIVALENT`` and ``MUTANTS_ON``. The file is parsed and not
    imported.
    Raises ``NoProofError``.
    """
    file = layout.proof_file(patch.id)
    if not file.is_file():
        raise NoProofError(f"{patch.id} has no proof: expected {file.relative_to(CHECKOUT)}")
    settings = {"unaffected": False}
    for statement in digests.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "unaffected":
            settings["unaffected"] = True
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("EQUIVALENT", "MUTANTS_ON", "OVERLAYS", "PARITY", "VARIANTS"):
                settings[name] = ast.literal_eval(statement.value)
    return settings


def overlays_of(patch: Patch, place: Place) -> tuple[str, ...]:
    """Return the overlays with which the proof is run: what the patch requires, and what the proof names."""
    return tuple(dict.fromkeys([*place.overlays_of(patch), *settings_of(patch).get("OVERLAYS", ())]))


def planned(patches: Iterable[Patch], places: Sequence[Place]) -> list[Case]:
    """Return where the proofs are run.

    These are releases that together have each distinct body in range of each target, the ends of the range, its
    neighbours outside, the newest release, and the first one with the fix: each on its main stack, and on others if the
    bug is only there. The last release in range, the fixed one and the newest also run with the newest transformers. Of
    a target that TRL's class inherits, each distinct body in transformers is run too.
    """
    return [Case(patch, place) for patch in patches for place in _planned(patch, places)]


def _planned(patch: Patch, places: Sequence[Place]) -> list[Place]:
    order = layout.releases()
    bodies = evidence.bodies_by_release(patch)
    in_range = {
        release: {
            (target.name, body)
            for target, body in zip(patch.targets, bodies[release], strict=True)
            if target in gates.targets_for(patch, release)
        }
        for release in order
        if gates.targets_for(patch, release)
    }
    inside = list(in_range)
    chosen = {order[-1], *inside[:1], *inside[-1:]}
    for release, following in itertools.pairwise(order):
        if (release in in_range) != (following in in_range):
            chosen |= {release, following}
    on_the_newest_stack = {order[-1], *inside[-1:]}
    if settings_of(patch).get("PARITY") and patch.upstream.fixed_in:
        chosen.add(patch.upstream.fixed_in)
        on_the_newest_stack.add(patch.upstream.fixed_in)
    uncovered = set().union(*in_range.values()).difference(*(in_range.get(release, set()) for release in chosen))
    while uncovered:
        best = max(inside, key=lambda release: len(in_range[release] & uncovered))
        chosen.add(best)
        uncovered -= in_range[best]
    beneath = _with_other_transformers(patch, places, chosen)
    return [
        place
        for place in places
        if place in beneath
        or (place.release in chosen and (place.is_main or _only_beside_main(patch, place)))
        or (place.release in on_the_newest_stack and place.is_newest)
    ]


def _with_other_transformers(patch: Patch, places: Sequence[Place], chosen: Collection[str]) -> set[Place]:
    """Return a place for each body in transformers that a target has with the bug, if possible of a chosen release."""
    by_body: dict[tuple[str, str], list[Place]] = {}
    for place in places:
        for target in place.targets_of(patch):
            base = evidence.inherits(place.release, target)
            body = inherited.body_of(base, place.version_of("transformers"))
            if body is not None:
                by_body.setdefault((target.name, body), []).append(place)
    return {
        next((place for place in reversed(of_body) if place.release in chosen), of_body[-1])
        for of_body in by_body.values()
        if not any(place.release in chosen and place.is_main for place in of_body)
    }


def _only_beside_main(patch: Patch, place: Place) -> bool:
    """Return whether the bug is here and not on the main stack, whose transformers is another."""
    return bool(place.targets_of(patch)) and not layout.main_place(place.release).targets_of(patch)


def missing(patches: Iterable[Patch], places: Sequence[Place]) -> list[Case]:
    """Return the proofs that are planned and not on record with the present key."""
    on_record = {
        (proof["patch"], str(evidence.place_of(proof))): proof["key"]
        for patch in patches
        for proof in evidence.load(patch.id)["proofs"]
    }
    return [case for case in planned(patches, places) if on_record.get(case.name) != keys.proof_key(*case)]


def with_fixed_release(cases: Sequence[Case]) -> list[Case]:
    """Return these cases and those of the fixed release with which they are compared, where its gradients are gone."""
    fixed = {
        case.name: case
        for patch in {case.patch.id: case.patch for case in cases}.values()
        if settings_of(patch).get("PARITY") and patch.upstream.fixed_in
        for case in planned([patch], layout.places([patch.upstream.fixed_in]))
        if not gradients_of(*case).is_file()
    }
    return list(({case.name: case for case in cases} | fixed).values())


def run(cases: Iterable[Case], jobs: int, console: Console, *, share: bool = True, fresh: bool = False) -> list[Answer]:
    """Return the result of each proof. ``share``: releases whose modules of the targets are equal share a run."""
    by_code: dict[Any, list[Case]] = {}
    for case in cases:
        shared = (case.patch.id, case.place.stack, keys.proof_key(*case), _trl_key(case))
        by_code.setdefault(shared if share else case.name, []).append(case)
    by_process: dict[tuple[Place, tuple[str, ...]], list[Case]] = {}
    for newest in (group[-1] for group in by_code.values()):
        if fresh or not is_kept(_file(newest)):
            by_process.setdefault((newest.place, overlays_of(*newest)), []).append(newest)
    in_parallel("proofs, by release", list(by_process.items()), _run, jobs, console)
    answers = []
    for group in by_code.values():
        answer = json.loads(_file(group[-1]).read_text())
        answers += [{**answer, "release": case.place.release} for case in group]
    return answers


def _trl_key(case: Case) -> str:
    return trl_code.module_key(case.place.release, {target.module for target in case.patch.targets})


def _run(work: tuple[tuple[Place, tuple[str, ...]], Sequence[Case]]) -> list[Answer]:
    """Run the proofs of one place and the same overlays in one process."""
    (place, overlays), cases = work
    gradients = {case.patch.id: gradients_of(*case) for case in cases}
    for file in gradients.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    pairs = [f"{patch_id}={file}" for patch_id, file in gradients.items()]
    arguments = ["-m", "bench.proving.prove_several", "{out}", str(SECONDS), *pairs]
    result = process(place, arguments, 60 + SECONDS * len(cases), *overlays)
    return [_kept(case, result if isinstance(result, str) else result[case.patch.id]) for case in cases]


def _kept(case: Case, result: Answer | str) -> Answer:
    if isinstance(result, str):
        result = {"verdict": "error", "why": result, "runs": {}}
    patch, place = case
    where = {"patch": patch.id, "release": place.release, "stack": place.stack, "ran": place.release}
    answer = {**where, **result, "key": keys.proof_key(patch, place), "trl": _trl_key(case)}
    _file(case).parent.mkdir(parents=True, exist_ok=True)
    _file(case).write_text(json.dumps(answer))
    return answer


def _file(case: Case) -> Path:
    return BENCH / "results" / f"proof-{case.patch.id}-{case.place}-{keys.proof_key(*case)}.json"


def has_parity(patch: Patch, release: str) -> bool:
    """Return whether the proof compares this release with the fixed one. ``PARITY`` is true, or the releases."""
    parity = settings_of(patch).get("PARITY", False)
    return in_range(release, parity) if isinstance(parity, str) else bool(parity)


def gradients_of(patch: Patch, place: Place) -> Path:
    return BENCH / "gradients" / patch.id / f"{place}-{keys.proof_key(patch, place)}.pt"


def parity(patches: Iterable[Patch], proofs: Sequence[Answer]) -> list[Answer]:
    """Return the largest differences of loss and gradients between patched old releases and the first fixed one.

    Raises ``ValueError`` where the gradients of two releases cannot be compared.
    """
    comparisons = []
    for patch in patches:
        if not settings_of(patch).get("PARITY"):
            continue
        proofs_of_patch = [proof for proof in proofs if proof["patch"] == patch.id]
        fixed_on = {proof["stack"]: proof for proof in proofs_of_patch if proof["release"] == patch.upstream.fixed_in}
        for place in layout.places([patch.upstream.fixed_in] if patch.upstream.fixed_in else []):
            # It was not run now, but its gradients are kept.
            recorded = {evidence.place_of(proof): proof for proof in evidence.load(patch.id)["proofs"]}.get(place)
            if place.stack not in fixed_on and recorded is not None and gradients_of(patch, place).is_file():
                fixed_on[place.stack] = recorded
        for proof in proofs_of_patch:
            # On the same stack if possible: transformers 5 names the weights of experts differently.
            fixed = fixed_on.get(proof["stack"], next(iter(fixed_on.values()), None))
            if fixed is not None and proof["verdict"] == "proven" and has_parity(patch, proof["release"]):
                comparison = _comparison(patch, proof, fixed)
                comparisons += [comparison] if comparison is not None else []
    return comparisons


def _comparison(patch: Patch, proof: Answer, fixed: Answer) -> Answer | None:
    """Return the differences, or None where two stacks name the gradients differently."""
    import torch

    gradients, fixed_gradients = (
        torch.load(gradients_of(patch, Place(answer["ran"], answer["stack"])))[run]
        for answer, run in ((proof, "green"), (fixed, "red"))
    )
    # The first fixed release may have more: of a trainer that crashes in the old release for another reason.
    if not gradients or not gradients.keys() <= fixed_gradients.keys():
        if proof["stack"] != fixed["stack"]:
            return None
        raise ValueError(f"{patch.id}: {proof['release']} and {fixed['release']} name their gradients differently")
    difference = max(float((gradients[name] - fixed_gradients[name]).abs().max()) for name in gradients)
    return {
        "patch": patch.id,
        "release": proof["release"],
        "stack": proof["stack"],
        "fixed_release": fixed["release"],
        "loss_difference": abs(proof["runs"]["green"]["loss"] - fixed["runs"]["red"]["loss"]),
        "gradient_difference": difference,
        "gradients": len(gradients),
    }
