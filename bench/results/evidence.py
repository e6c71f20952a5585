"""``evidence/<id>.json``: what the bench has seen of one patch, and the key of what each result depends on.

    python -m bench.results.evidence     # write these files again: what follows from the results is made anew

The format of a file is in ``trl_hotfix.catalogue.evidence_file``. What the package needs, the bodies and what is
proven, is condensed by ``trl_hotfix.catalogue.condensed``: in a checkout when it is asked for, in a wheel when that is
built.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from trl_hotfix import __version__
from trl_hotfix.catalogue import evidence_file, loading
from trl_hotfix.matching import inherited
from trl_hotfix.matching.gates import lacking, targets_for
from trl_hotfix.matching.sources import Release
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Patch, Target

from bench.releases import layout
from bench.releases.layout import BENCH, CHECKOUT, Place
from bench.results import keys

EVIDENCE = CHECKOUT / "evidence"

Answer = dict[str, Any]

WHAT = {"reproduced": "buggy", "fixed": "fixed", "absent": "absent"}
"""What a verdict of the unpatched self-test says of a body."""


def load(patch_id: str, folder: Path = EVIDENCE) -> Answer:
    """Return what is on record of a patch, with one cell for each place."""
    file = folder / f"{patch_id}.json"
    if not file.is_file():
        lists: Answer = {kind: [] for kind in ("releases", "proven", "cells", "beneath", "proofs", "parity")}
        return {"patch": patch_id, "bodies": {}, "inherited": {}, "curve": None, "mutants": None, **lists}
    record = evidence_file.read(file)
    for answer in itertools.chain(*(record[kind] for kind in ("cells", "beneath", "proofs", "parity"))):
        answer["patch"] = patch_id
    return record


def everything(folder: Path = EVIDENCE) -> Answer:
    """Return the evidence of the whole catalogue. A cell is stale if its key is not the present one."""
    records = [(patch, load(patch.id, folder)) for patch in loading.load()]
    cells = [
        {**cell, "stale": place not in known or cell["key"] != keys.cell_key(patch, place)}
        for known in [set(layout.places())]
        for patch, record in records
        for cell in record["cells"]
        for place in [place_of(cell)]
    ]
    trainings = {kind: [entry for _, record in records for entry in record[kind]] for kind in ("proofs", "parity")}
    curves, mutants = (
        {patch.id: record[name] for patch, record in records if record[name] is not None}
        for name in ("curve", "mutants")
    )
    return {
        "trl_hotfix": __version__,
        "releases": list(layout.releases()),
        "cells": cells,
        **trainings,
        "curves": curves,
        "mutants": mutants,
    }


def write(
    patch: Patch,
    cells: Iterable[Answer] = (),
    proofs: Iterable[Answer] = (),
    parity: Iterable[Answer] = (),
    folder: Path = EVIDENCE,
    beneath: Iterable[Answer] = (),
) -> None:
    """Replace old results of ``patch`` for the same release and stack by new ones."""
    record = load(patch.id, folder)
    between = {place_of(answer): answer for answer in [*record["beneath"], *beneath]}
    record["beneath"] = [between[place] for place in beneath_of(patch) if place in between]
    known = set(layout.places())
    for kind, answers in (("cells", cells), ("proofs", proofs), ("parity", parity)):
        merged = {place_of(answer): answer for answer in [*record[kind], *answers]}
        record[kind] = [answer for place, answer in merged.items() if place in known]
    # A proof that is not planned any more is not run again, so what is on record of it would be of other code.
    record["proofs"] = [proof for proof in record["proofs"] if proof["key"] == keys.proof_key(patch, place_of(proof))]
    proven = set(map(place_of, record["proofs"]))
    record["parity"] = [comparison for comparison in record["parity"] if place_of(comparison) in proven]
    _save(patch, record, folder)


def write_curve(patch: Patch, curve: Answer | None) -> None:
    """Replace the curve of ``patch``, the losses of longer runs. None: there is no visible difference to draw."""
    _save(patch, {**load(patch.id), "curve": curve}, EVIDENCE)


def write_mutants(patch: Patch, counts: Answer) -> None:
    """Replace the counts of the mutants of ``patch``."""
    _save(patch, {**load(patch.id), "mutants": counts}, EVIDENCE)


def _save(patch: Patch, record: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{patch.id}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(dumped(patch, record), encoding="utf-8")
    partial.replace(file)


def dumped(patch: Patch, record: Mapping[str, Any]) -> str:
    """Return the text of an evidence file, with what follows from the cells. An error may name a file of a stack."""
    record = json.loads(json.dumps(record).replace(f"{BENCH}/", ".bench/"))
    cells, beneath = record["cells"], record["beneath"]
    bodies = {"bodies": bodies_of(patch, cells), "inherited": inherited_of(patch, [*cells, *beneath])}
    return evidence_file.text({**record, "patch": patch.id, "revision": patch.revision, **bodies})


def place_of(answer: Mapping[str, Any]) -> Place:
    return Place(answer["release"], answer["stack"], answer.get("transformers", ""))


def body(release: str, target: Target) -> str | None:
    """Return the body of ``target`` in a release of TRL, or None if it has none, or inherits it from transformers."""
    known = _of_wheel(release, target)
    return known if known is None or not known.startswith(INHERITED) else None


def inherits(release: str, target: Target) -> str | None:
    """Return what a release inherits as ``target``, such as ``transformers:Trainer.training_step``, or None."""
    known = _of_wheel(release, target) or ""
    base = known.removeprefix(INHERITED) if known.startswith(INHERITED) else None
    return base if base is not None and inherited.bodies_of(base) else None


def body_or_base(release: str, target: Target) -> str | None:
    """Return the body of ``target`` in a release of TRL, or what it inherits as that."""
    return body(release, target) or inherits(release, target)


def _of_wheel(release: str, target: Target) -> str | None:
    """Return a body, or what is inherited. It is read from the wheel once, since wheels do not change."""
    known, name = _bodies(), f"{release} {target.name}"
    if name not in known:
        # Read all bodies of one release, then drop it: the syntax trees of all releases are a gigabyte.
        code = Release(BENCH / "overlay" / release)
        targets = {target}.union(*(patch.targets for patch in loading.load()))
        known |= {f"{release} {target.name}": _read(code, target) for target in targets}
        _bodies_file().parent.mkdir(parents=True, exist_ok=True)
        _bodies_file().write_text(json.dumps(known))
    return known[name]


def _read(code: Release, target: Target) -> str | None:
    base = code.inherits(target.module, target.attribute)
    return code.body(target.module, target.attribute) if base is None else f"{INHERITED}{base}"


INHERITED = "inherits "


@functools.cache
def _bodies() -> dict[str, str | None]:
    file = _bodies_file()
    return dict(json.loads(file.read_text())) if file.is_file() else {}


@functools.cache
def _bodies_file() -> Path:
    """Return the file for the bodies that the current code of the digests has read."""
    readers = (CHECKOUT / "trl_hotfix" / "matching" / name for name in ("digests.py", "sources.py"))
    return BENCH / "bodies" / f"{keys.digest_of([*(reader.read_text() for reader in readers), INHERITED])}.json"


def bodies_by_release(patch: Patch) -> dict[str, tuple[str | None, ...]]:
    """Return for every release the bodies of the patch's targets: those on record, and others from the wheels."""
    record = load(patch.id)
    return {
        release: tuple(_recorded_body(record, release, target) for target in patch.targets)
        for release in layout.releases()
    }


def _recorded_body(record: Answer, release: str, target: Target) -> str | None:
    if release not in record["releases"] or target.name not in record["bodies"]:
        return body(release, target)
    by_body = record["bodies"][target.name]
    return next((digest for digest, known in by_body.items() if release in known["releases"]), None)


def bodies_of(patch: Patch, cells: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return for every target the releases that have each body, and the self-test's verdict on them.

    They are in the order in which a cell has them: by module.
    Raises ``ValueError`` if one body was seen with the bug and without it.
    """
    verdicts = _verdicts_on_bodies(patch, cells)
    releases = sorted({cell["release"] for cell in cells}, key=Version)
    bodies: dict[str, dict[str, Any]] = {}
    for name, targets in _targets_by_name(patch).items():
        by_body = bodies.setdefault(name, {})
        for release in releases:
            digest = body(release, targets[0])
            if digest is None or _hands_on(patch, targets, release):
                continue
            known = by_body.setdefault(digest, {"releases": []})
            known["releases"].append(release)
            # Fixed in the module that defines it and absent in one that re-exports it means fixed.
            labels = verdicts.get((name, digest))
            if labels:
                known["is"] = "fixed" if "fixed" in labels else labels.copy().pop()
    modules = list(dict.fromkeys(target.module for target in patch.targets))
    return dict(sorted(bodies.items(), key=lambda body: modules.index(body[0].partition(":")[0])))


def inherited_of(patch: Patch, cells: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return for every target that a release in range inherits from transformers what it is there, by which releases.

    The verdicts are on the bodies in transformers, as the cells have seen them. Raises ``ValueError`` as ``bodies_of``.
    """
    verdicts = _verdicts_on_bodies(patch, cells)
    releases = sorted({cell["release"] for cell in cells}, key=Version)
    found: dict[str, dict[str, Any]] = {}
    for name, targets in _targets_by_name(patch).items():
        inside = [release for release in releases if _in_any_range(patch, targets, release)]
        bases = {release: base for release in inside if (base := inherits(release, targets[0])) is not None}
        if bases:
            (base,) = set(bases.values())
            bodies = sorted(inherited.bodies_of(base))
            labels = {body: verdicts[name, body].copy().pop() for body in bodies if verdicts.get((name, body))}
            found[name] = {"of": base, "by": list(bases), "is": labels}
    return dict(sorted(found.items()))


def beneath_of(patch: Patch) -> list[Place]:
    """Return a place for each body in transformers that targets of ``patch`` have between the stacks, and not on one.

    It is the newest release of TRL in range that admits this transformers, with it in front of the stack that has the
    next newer one. If no stack of the oldest release in range has the transformers that the patch requires, there is a
    place for that release too: the range begins there, and something has to show it.
    """
    specifiers = patch.requires.get("transformers")
    if specifiers is None:
        return []
    inheriting = [place for place in layout.places() if _inherited_targets(patch, place)]
    known: set[tuple[str, str | None]] = {
        (target.name, body)
        for place in inheriting
        if place.targets_of(patch)
        for target, base in _inherited_targets(patch, place)
        if (body := inherited.body_of(base, place.version_of("transformers"))) is not None
    }
    stacks = [stack for stack in layout.stacks() if stack in {place.stack for place in inheriting}]
    chosen = []
    for version in [version for version in inherited.releases() if inheriting and in_range(version, specifiers)]:
        newer = [stack for stack in stacks if _transformers_of(stack) >= Version(version)]
        admitting = [place for place in inheriting if layout.admits(place.release, version)]
        on_stacks = ([place for place in admitting if place.stack == stack] for stack in newer or stacks[-1:])
        place = next((places[-1] for places in on_stacks if places), None)
        if place is None:
            continue
        here = {(target.name, inherited.body_of(base, version)) for target, base in _inherited_targets(patch, place)}
        if here - known:
            known |= here
            chosen.append(Place(place.release, place.stack, version))
    return [*_oldest_beneath(patch, inheriting, specifiers), *chosen]


def _oldest_beneath(patch: Patch, inheriting: Sequence[Place], specifiers: str) -> list[Place]:
    """Return a place for the oldest of the releases, or none if one of its stacks has the transformers it requires."""
    of_oldest = [place for place in inheriting if place.release == inheriting[0].release]
    if not of_oldest or any(place.targets_of(patch) for place in of_oldest):
        return []
    release = of_oldest[0].release
    admitted = [version for version in inherited.releases() if layout.admits(release, version)]
    newest = max((version for version in admitted if in_range(version, specifiers)), key=Version, default=None)
    if newest is None:
        return []
    # The libraries of a stack fit its own transformers and the one before.
    newer = [stack for stack in layout.stacks() if _transformers_of(stack) >= Version(newest)]
    return [Place(release, min(newer, key=_transformers_of), newest)]


def _transformers_of(stack: str) -> Version:
    return Version(layout.versions(stack)["transformers"])


def _inherited_targets(patch: Patch, place: Place) -> list[tuple[Target, str]]:
    """Return the targets that the release has in range and inherits, with what they are in transformers."""
    targets = targets_for(patch, place.release)
    return [(target, base) for target in targets if (base := inherits(place.release, target)) is not None]


def _targets_by_name(patch: Patch) -> dict[str, list[Target]]:
    """Return the targets by name: a method may have one wrapper in older releases and another in newer ones."""
    named: dict[str, list[Target]] = {}
    for target in patch.targets:
        named.setdefault(target.name, []).append(target)
    return named


def _in_any_range(patch: Patch, targets: Iterable[Target], release: str) -> bool:
    return any(in_range(release, patch.range_of(target)) for target in targets)


def _verdicts_on_bodies(patch: Patch, cells: Iterable[Answer]) -> dict[tuple[str, str], set[str]]:
    verdicts: dict[tuple[str, str], set[str]] = {}
    harmless: set[tuple[str, str]] = set()
    named = _targets_by_name(patch)
    for cell in cells:
        # Next to a library that has repaired the bug, a body with the bug looks like one without.
        if lacking(patch, place_of(cell).versions_for(patch)) is not None:
            continue
        for name, digest in cell["bodies"].items():
            red = cell["leaves"].get(name.partition(":")[0], {}).get("red")
            if red is None or digest is None or name not in named:
                continue
            inside = _in_any_range(patch, named[name], cell["release"])
            # The verdict is about the whole module: in this release the bug is in another target of the patch.
            if red["verdict"] == "reproduced" and not inside:
                continue
            # For a method that a module only re-exports, the verdict counts in the module that defines the method.
            if _hands_on(patch, named[name], cell["release"]):
                continue
            if red["verdict"] == "absent" and not inside:
                harmless.add((name, digest))
                continue
            verdicts.setdefault((name, digest), set()).add(WHAT[red["verdict"]])
    # Out of its range a body may do no harm for what is around it: KTO of 0.11 shuffles the rows that it is given. Its
    # self-test decides there, as it does wherever a body is known to have the bug.
    for key in harmless:
        verdicts.setdefault(key, {WHAT["absent"]})
    contradictory = [key for key, labels in verdicts.items() if "buggy" in labels and len(labels) > 1]
    if contradictory:
        raise ValueError(f"these bodies of {patch.id} were seen with the bug and without: {contradictory}")
    return verdicts


def _hands_on(patch: Patch, targets: Sequence[Target], release: str) -> bool:
    """Return whether ``targets``, all of one name, are of a class that has moved, and the patch has the new name too.

    The body under the old name is the one with the bug, although the range of the target ends with the move.
    """
    if _in_any_range(patch, targets, release):
        return False
    moved = [
        other
        for other in patch.targets
        if other.attribute == targets[0].attribute and other not in targets and _in_any_range(patch, [other], release)
    ]
    digest = body(release, targets[0]) if moved else None
    return digest is not None and any(body(release, new) == digest for new in moved)


def proposed_range(patch: Patch, cells: Iterable[Answer]) -> str:
    """Return the PEP 440 range of the releases on which the self-test reproduced the bug, unpatched.

    A release that was only run beside libraries that the patch does not ask for is no hole in it.
    """
    cells, order = list(cells), layout.releases()
    telling = {cell["release"] for cell in cells if lacking(patch, place_of(cell).versions_for(patch)) is None}
    reproduced = {
        cell["release"]
        for cell in cells
        if any(runs.get("red", {}).get("verdict") == "reproduced" for runs in cell["leaves"].values())
    }
    inside = [release for release in order if release in reproduced]
    if not inside:
        return ""
    first, last = order.index(inside[0]), order.index(inside[-1])
    ends = f",<{order[last + 1]}" if last + 1 < len(order) else ""
    holes = "".join(f",!={release}" for release in order[first:last] if release in telling - reproduced)
    return f">={inside[0]}{ends}{holes}"


if __name__ == "__main__":
    for patch in loading.load():
        write(patch)
