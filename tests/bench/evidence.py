"""``evidence/matrix.json`` and what is made of it: ``fingerprints.json``, ``proven.json`` and the picture.

python tests/bench/evidence.py     # make these again from the evidence and the wheels
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from packaging.version import Version

from trl_hotfix import __version__
from trl_hotfix.catalogue import loading
from trl_hotfix.matching.fingerprints import Bodies
from trl_hotfix.matching.gates import lacking
from trl_hotfix.matching.sources import Release
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Patch, Target
from trl_hotfix.reporting.sentences import links

import layout
import picture
from layout import BENCH, CHECKOUT

EVIDENCE = CHECKOUT / "evidence" / "matrix.json"
CURVES = CHECKOUT / "evidence" / "curves.json"
FINGERPRINTS = CHECKOUT / "trl_hotfix" / "data" / "fingerprints.json"
PROVEN = CHECKOUT / "trl_hotfix" / "data" / "proven.json"

WHAT = {"reproduced": "buggy", "fixed": "fixed", "absent": "absent"}


def load() -> dict[str, Any]:
    if not EVIDENCE.is_file():
        return {"cells": [], "proofs": [], "parity": []}
    data: dict[str, Any] = json.loads(EVIDENCE.read_text())
    return data


def write(cells: Iterable[Any], proofs: Iterable[Any], parity: Iterable[Any]) -> None:
    """Put new answers in the place of old ones for the same patch, release and stack; then make all that follows."""
    known = {patch.id for patch in loading.load()}
    data = load()
    new = {"cells": cells, "proofs": proofs, "parity": parity}
    for kind, answers in new.items():
        merged = {_key(each): each for each in [*data[kind], *answers] if each["patch"] in known}
        data[kind] = [merged[key] for key in sorted(merged, key=_order)]
    data = {"trl_hotfix": __version__, "releases": list(layout.releases()), **{kind: data[kind] for kind in new}}
    EVIDENCE.parent.mkdir(exist_ok=True)
    EVIDENCE.write_text(json.dumps(data, indent=1) + "\n")
    make()


def write_curve(patch: Patch, found: Any) -> None:
    """Put the curve of ``patch`` in the place of the old one; None: there is none to be seen."""
    curves = json.loads(CURVES.read_text()) if CURVES.is_file() else []
    kept = [each for each in curves if each["patch"] != patch.id] + ([found] if found is not None else [])
    # A number a line would be a file of thousands of lines.
    lines = [f"\n{json.dumps(each)}" for each in sorted(kept, key=lambda each: each["patch"])]
    CURVES.write_text(f"[{','.join(lines)}\n]\n")


def make() -> None:
    """Write ``fingerprints.json``, ``proven.json`` and the picture from the evidence and the wheels."""
    made = fingerprints()
    FINGERPRINTS.write_text(json.dumps(made, indent=1) + "\n")
    known = Bodies(**made)
    PROVEN.write_text(json.dumps(proven(known), indent=1) + "\n")
    _bodies_file().parent.mkdir(exist_ok=True)
    _bodies_file().write_text(json.dumps(_bodies()))
    data = load()
    for cell in data["cells"]:
        cell["stale"] = is_stale(cell, known)
    rows = [
        picture.Row(patch.id, patch.title, patch.severity.value, patch.trl, tuple(links(patch.upstream)))
        for patch in loading.load()
    ]
    for name, drawn in (("matrix.svg", picture.svg(data, rows)), ("matrix.html", picture.html(data, rows))):
        (EVIDENCE.parent / name).write_text(drawn)


def is_stale(cell: Any, known: Bodies) -> bool:
    """The patch has another revision since, or the method another body in ``known``, the fingerprints of now."""
    patch = next((patch for patch in loading.load() if patch.id == cell["patch"]), None)
    same = all(known.at(target, cell["release"]) in (None, body) for target, body in cell["bodies"].items())
    return patch is None or cell["revision"] != patch.revision or not same


def proven(known: Bodies) -> dict[str, Any]:
    """For every patch as it is now, the releases on which each of its cells is red, green and red."""
    found: dict[str, Any] = {}
    every = load()["cells"]
    for patch in loading.load():
        cells = [each for each in every if each["patch"] == patch.id]
        good = {each["release"] for each in cells if each["verdict"] == "proven" and not is_stale(each, known)}
        bad = {each["release"] for each in cells if each["verdict"] not in ("proven", "absent")}
        found[patch.id] = {"revision": patch.revision, "releases": sorted(good - bad, key=Version)}
    return found


def _key(answer: Any) -> tuple[str, str, str]:
    return answer["patch"], answer["release"], answer["stack"]


def _order(key: tuple[str, str, str]) -> tuple[Any, ...]:
    return key[0], Version(key[1]), key[2]


def body(release: str, target: Target) -> str | None:
    """The body of ``target`` in a release: read from its wheel once, since that does not change."""
    known, key = _bodies(), f"{release} {target.name}"
    if key not in known:
        # All of one release, which is let go then: the syntax trees of all of them are a gigabyte.
        its = Release(BENCH / "overlay" / release)
        every = {target, *(each for patch in loading.load() for each in patch.targets)}
        known |= {f"{release} {each.name}": its.body(each.module, each.attribute) for each in every}
    return known[key]


@functools.cache
def _bodies() -> dict[str, str | None]:
    file = _bodies_file()
    return dict(json.loads(file.read_text())) if file.is_file() else {}


@functools.cache
def _bodies_file() -> Path:
    """What was read, as it is read now."""
    reads = (CHECKOUT / "trl_hotfix" / "matching" / name for name in ("digests.py", "sources.py"))
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in reads)).hexdigest()[:16]
    return BENCH / "bodies" / f"{digest}.json"


def bodies_by_release(patch: Patch) -> dict[str, tuple[str | None, ...]]:
    """For every release, the bodies of the patch's targets."""
    return {release: tuple(body(release, target) for target in patch.targets) for release in layout.releases()}


def fingerprints() -> dict[str, Any]:
    """For every target, the releases that have each body, and for every patch what the self-test said on them.

    Raises ``ValueError`` if one body was seen with the bug and without.
    """
    said: dict[tuple[str, str, str], set[str]] = {}
    ranges = {(patch.id, each.name): patch.range_of(each) for patch in loading.load() for each in patch.targets}
    handed_on = {
        (patch.id, target.name, release)
        for patch in loading.load()
        for target in patch.targets
        for release in layout.releases()
        if _hands_on(patch, target, release)
    }
    patches = {patch.id: patch for patch in loading.load()}
    for cell in load()["cells"]:
        # Beside a library that has mended it, a body with the bug looks as one without.
        if lacking(patches[cell["patch"]], layout.Place(cell["release"], cell["stack"]).version_of) is not None:
            continue
        for name, its in cell["bodies"].items():
            red = cell["leaves"].get(name.partition(":")[0], {}).get("red")
            if red is not None and its is not None:
                # The self-test speaks of the leaf: in this release the bug is in another target of the patch.
                if red["verdict"] == "reproduced" and not in_range(cell["release"], ranges[cell["patch"], name]):
                    continue
                # Of a method that a module only hands on, it speaks in the module where the method is.
                if (cell["patch"], name, cell["release"]) in handed_on:
                    continue
                said.setdefault((name, its, cell["patch"]), set()).add(WHAT[red["verdict"]])
    both = [key for key, what in said.items() if "buggy" in what and len(what) > 1]
    if both:
        raise ValueError(f"these bodies were seen with the bug and without: {both}")
    targets: dict[str, dict[str, Any]] = {}
    for patch in loading.load():
        for target in patch.targets:
            bodies = targets.setdefault(target.name, {})
            for release in layout.releases():
                its = body(release, target)
                if its is None or (patch.id, target.name, release) in handed_on:
                    continue
                known = bodies.setdefault(its, {"releases": [], "is": {}})
                if release not in known["releases"]:
                    known["releases"].append(release)
                # Fixed where it can be seen, absent where the module only hands it on: it is fixed.
                what = said.get((target.name, its, patch.id))
                if what:
                    known["is"][patch.id] = "fixed" if "fixed" in what else what.copy().pop()
    return {"releases": list(layout.releases()), "targets": dict(sorted(targets.items()))}


def _hands_on(patch: Patch, target: Target, release: str) -> bool:
    """Is this the old name of a class that has moved, while the patch is on the method where it is now?

    The body there is the one with the bug, and the range of the target ends with the move all the same.
    """
    if in_range(release, patch.range_of(target)):
        return False
    moved = [
        each
        for each in patch.targets
        if each.attribute == target.attribute and each is not target and in_range(release, patch.range_of(each))
    ]
    there = body(release, target) if moved else None
    return there is not None and any(body(release, each) == there for each in moved)


def proposed_range(patch: Patch, cells: Sequence[Any]) -> str:
    """The PEP 440 range of the releases on which the self-test reproduced the bug, unpatched."""
    order = layout.releases()
    reproduced = {
        cell["release"]
        for cell in cells
        if cell["patch"] == patch.id
        and any(runs.get("red", {}).get("verdict") == "reproduced" for runs in cell["leaves"].values())
    }
    inside = [release for release in order if release in reproduced]
    if not inside:
        return ""
    first, last = order.index(inside[0]), order.index(inside[-1])
    ends = f",<{order[last + 1]}" if last + 1 < len(order) else ""
    holes = "".join(f",!={release}" for release in order[first:last] if release not in reproduced)
    return f">={inside[0]}{ends}{holes}"


if __name__ == "__main__":
    make()
