"""``evidence/matrix.json`` and the files made from it: ``fingerprints.json``, ``proven.json`` and the picture.

python tests/bench/evidence.py     # make these files again from the evidence and the wheels
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
    """Replace old answers for the same patch, release and stack by new ones, and make the files that depend on them."""
    known = {patch.id for patch in loading.load()}
    data = load()
    new = {"cells": cells, "proofs": proofs, "parity": parity}
    for kind, answers in new.items():
        merged = {_key(answer): answer for answer in [*data[kind], *answers] if answer["patch"] in known}
        data[kind] = [merged[key] for key in sorted(merged, key=_order)]
    data = {"trl_hotfix": __version__, "releases": list(layout.releases()), **{kind: data[kind] for kind in new}}
    EVIDENCE.parent.mkdir(exist_ok=True)
    EVIDENCE.write_text(json.dumps(data, indent=1) + "\n")
    make()


def write_curve(patch: Patch, new_curve: Any) -> None:
    """Replace the curve of ``patch``; None removes it, as there is no visible difference to draw."""
    curves = json.loads(CURVES.read_text()) if CURVES.is_file() else []
    kept = [curve for curve in curves if curve["patch"] != patch.id] + ([new_curve] if new_curve is not None else [])
    # With one number a line the file would have thousands of lines.
    lines = [f"\n{json.dumps(curve)}" for curve in sorted(kept, key=lambda curve: curve["patch"])]
    CURVES.write_text(f"[{','.join(lines)}\n]\n")


def make() -> None:
    """Write ``fingerprints.json``, ``proven.json`` and the picture from the evidence and the wheels."""
    record = fingerprints()
    FINGERPRINTS.write_text(json.dumps(record, indent=1) + "\n")
    known = Bodies(**record)
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
    """Return whether the patch has another revision now, or the method another body in ``known``, the fingerprints."""
    patch = next((patch for patch in loading.load() if patch.id == cell["patch"]), None)
    current = all(known.at(target, cell["release"]) in (None, body) for target, body in cell["bodies"].items())
    return patch is None or cell["revision"] != patch.revision or not current


def proven(known: Bodies) -> dict[str, Any]:
    """Return for every patch in its current revision the releases on which each of its cells is red, green and red."""
    entries: dict[str, Any] = {}
    answers = load()["cells"]
    for patch in loading.load():
        cells = [cell for cell in answers if cell["patch"] == patch.id]
        good = {cell["release"] for cell in cells if cell["verdict"] == "proven" and not is_stale(cell, known)}
        bad = {cell["release"] for cell in cells if cell["verdict"] not in ("proven", "absent")}
        entries[patch.id] = {"revision": patch.revision, "releases": sorted(good - bad, key=Version)}
    return entries


def _key(answer: Any) -> tuple[str, str, str]:
    return answer["patch"], answer["release"], answer["stack"]


def _order(key: tuple[str, str, str]) -> tuple[Any, ...]:
    return key[0], Version(key[1]), key[2]


def body(release: str, target: Target) -> str | None:
    """Return the body of ``target`` in a release. It is read from the wheel once, since wheels do not change."""
    known, key = _bodies(), f"{release} {target.name}"
    if key not in known:
        # Read all bodies of one release, then drop it: the syntax trees of all releases are a gigabyte.
        code = Release(BENCH / "overlay" / release)
        targets = {target}.union(*(patch.targets for patch in loading.load()))
        known |= {f"{release} {target.name}": code.body(target.module, target.attribute) for target in targets}
    return known[key]


@functools.cache
def _bodies() -> dict[str, str | None]:
    file = _bodies_file()
    return dict(json.loads(file.read_text())) if file.is_file() else {}


@functools.cache
def _bodies_file() -> Path:
    """Return the file for the bodies that the current code of the digests has read."""
    reads = (CHECKOUT / "trl_hotfix" / "matching" / name for name in ("digests.py", "sources.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in reads)).hexdigest()[:16]
    return BENCH / "bodies" / f"{digest}.json"


def bodies_by_release(patch: Patch) -> dict[str, tuple[str | None, ...]]:
    """Return for every release the bodies of the patch's targets."""
    return {release: tuple(body(release, target) for target in patch.targets) for release in layout.releases()}


def fingerprints() -> dict[str, Any]:
    """Return for every target the releases that have each body, and for every patch the self-test's verdict on them.

    Raises ``ValueError`` if one body was seen with the bug and without it.
    """
    verdicts: dict[tuple[str, str, str], set[str]] = {}
    ranges = {(patch.id, target.name): patch.range_of(target) for patch in loading.load() for target in patch.targets}
    handed_on = {
        (patch.id, target.name, release)
        for patch in loading.load()
        for target in patch.targets
        for release in layout.releases()
        if _hands_on(patch, target, release)
    }
    patches = {patch.id: patch for patch in loading.load()}
    for cell in load()["cells"]:
        # Next to a library that has repaired the bug, a body with the bug looks like one without.
        if lacking(patches[cell["patch"]], layout.Place(cell["release"], cell["stack"]).version_of) is not None:
            continue
        for name, digest in cell["bodies"].items():
            red = cell["leaves"].get(name.partition(":")[0], {}).get("red")
            if red is not None and digest is not None:
                # The verdict is about the whole module: in this release the bug is in another target of the patch.
                if red["verdict"] == "reproduced" and not in_range(cell["release"], ranges[cell["patch"], name]):
                    continue
                # For a method that a module only re-exports, the verdict counts in the module that defines the method.
                if (cell["patch"], name, cell["release"]) in handed_on:
                    continue
                verdicts.setdefault((name, digest, cell["patch"]), set()).add(WHAT[red["verdict"]])
    contradictory = [key for key, labels in verdicts.items() if "buggy" in labels and len(labels) > 1]
    if contradictory:
        raise ValueError(f"these bodies were seen with the bug and without: {contradictory}")
    targets: dict[str, dict[str, Any]] = {}
    for patch in loading.load():
        for target in patch.targets:
            bodies = targets.setdefault(target.name, {})
            for release in layout.releases():
                digest = body(release, target)
                if digest is None or (patch.id, target.name, release) in handed_on:
                    continue
                known = bodies.setdefault(digest, {"releases": [], "is": {}})
                if release not in known["releases"]:
                    known["releases"].append(release)
                # Fixed in the module that defines it and absent in one that re-exports it means fixed.
                labels = verdicts.get((target.name, digest, patch.id))
                if labels:
                    known["is"][patch.id] = "fixed" if "fixed" in labels else labels.copy().pop()
    return {"releases": list(layout.releases()), "targets": dict(sorted(targets.items()))}


def _hands_on(patch: Patch, target: Target, release: str) -> bool:
    """Return whether ``target`` is the old name of a class that has moved, and the patch has the new name as well.

    The body under the old name is the one with the bug, although the range of the target ends with the move.
    """
    if in_range(release, patch.range_of(target)):
        return False
    moved = [
        other
        for other in patch.targets
        if other.attribute == target.attribute and other is not target and in_range(release, patch.range_of(other))
    ]
    digest = body(release, target) if moved else None
    return digest is not None and any(body(release, new) == digest for new in moved)


def proposed_range(patch: Patch, cells: Sequence[Any]) -> str:
    """Return the PEP 440 range of the releases on which the self-test reproduced the bug, unpatched."""
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
