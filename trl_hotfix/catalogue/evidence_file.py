"""The format of ``evidence/<id>.json``: what the bench has seen of one patch. No other module knows it.

People read these files, and their changes in ``git log -p``. So each distinct result stands there once, under its
verdict and the first digits of its digest, and a table of places names it:

    "0.11.3": {"absent-5c1f of 0.11.4": "tf4.40 tf4.44"}

On two stacks TRL 0.11.3 has this result; the run was on 0.11.4, which is equal in all that the run called. If a cell
runs again, the line of its release changes, and a new result is added. Modules with the same numbers share them in a
result.

A body or a key stands at the first release that has it, and holds until the next one: ``{"0.9.6": "c1:0 buggy",
"0.12.0": null}`` is a method with the bug that 0.12.0 no longer has. The list of releases, what is proven, and most
bodies that a cell has seen follow from the tables, and no file has them. A result names only the bodies that differ
from those of its release. Most of these are inherited from transformers.

The build of a wheel loads this module alone, without the libraries of the package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from packaging.version import Version

Record = dict[str, Any]
Bodies = Mapping[str, Mapping[str, Any]]
Value = TypeVar("Value")

CELL: Mapping[str, Any] = {"why": "", "leaves": {}, "bodies": {}}
PROOF: Mapping[str, Any] = {"why": "", "runs": {}}
"""What a result has besides its verdict. We do not write it where it is as empty as here."""
PARITY = ("release", "stack", "fixed_release", "loss_difference", "gradient_difference", "gradients")

RAN_ON = " of "
IN_FRONT = "+transformers-"
"""What stands between a stack and the transformers that is in front of its own."""
NOT_THERE = "not there"

WIDTH = 160
"""What holds neither lists nor objects stands on one line up to this length."""


class Table(TypedDict):
    """The results, where they were seen, and by stack the keys that they had."""

    places: dict[str, dict[str, str]]
    keys: dict[str, dict[str, str]]
    results: dict[str, dict[str, Any]]


Inherited = TypedDict("Inherited", {"of": str, "by": dict[str, bool], "is": dict[str, str]})
"""A target that releases inherit from transformers: what it is there, by which releases, and the verdicts on bodies."""


class _OfInherited(TypedDict, total=False):
    inherited: dict[str, Inherited]
    beneath: Table


class Document(_OfInherited):
    """The JSON of a file. Only a patch on a method that TRL's class inherits has ``inherited`` and ``beneath``."""

    patch: str
    revision: int
    bodies: dict[str, dict[str, str | None]]
    cells: Table
    proofs: Table
    parity: list[dict[str, Any]]
    curve: dict[str, Any] | None
    mutants: dict[str, Any] | None


def paths(folder: Path) -> list[Path]:
    """Return the file of each patch in ``folder``. ``gpu.json`` has the runs on a GPU, for all patches together."""
    return [path for path in sorted(folder.glob("*.json")) if path.name != "gpu.json"]


def read_all(folder: Path) -> list[Record]:
    """Return what is on record of each patch in ``folder``."""
    return [read(path) for path in paths(folder)]


def read(path: Path) -> Record:
    """Return what is on record of a patch."""
    return record_of(json.loads(path.read_text(encoding="utf-8")))


def record_of(document: Document) -> Record:
    """Return all that is on record of a patch, with a cell and a proof for each place, by release and stack."""
    record = {**bodies_of(document), **trainings_of(document)}
    record["cells"] = list(_cells(document["cells"], record["bodies"]))
    record["beneath"] = list(_cells(document["beneath"], record["bodies"])) if "beneath" in document else []
    return {**record, "curve": document["curve"], "mutants": document["mutants"]}


def bodies_of(document: Document) -> Record:
    """Return the part of a record on the bodies and on what is proven, without the cells, which are most of it."""
    places = document["cells"]["places"]
    return {
        "patch": document["patch"],
        "revision": document["revision"],
        "releases": list(places),
        "proven": proven({release: map(_verdict, row) for release, row in places.items()}),
        "bodies": {target: _by_body(_lasting(first, places)) for target, first in document["bodies"].items()},
        "inherited": {
            target: {**known, "by": [release for release, does in _lasting(known["by"], places) if does]}
            for target, known in document.get("inherited", {}).items()
        },
    }


def trainings_of(document: Document) -> Record:
    """Return the part of a record on the trainings."""
    return {
        "revision": document["revision"],
        "proofs": list(_answers(document["proofs"], PROOF)),
        "parity": document["parity"],
    }


def proven(verdicts: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the releases, in their order, on which each cell is red, green and red, or has no bug."""
    found = {release: set(of_release) for release, of_release in verdicts.items()}
    return [release for release, seen in found.items() if "proven" in seen and seen <= {"proven", "absent"}]


def text(record: Mapping[str, Any]) -> str:
    """Return the text of a file. What ``record_of`` makes of the rest is not written."""
    releases = list(dict.fromkeys(cell["release"] for cell in sorted(record["cells"], key=_place)))
    bodies, document = record["bodies"], {name: record[name] for name in ("patch", "revision")}
    document["bodies"] = {target: _first(_words(by_body, releases)) for target, by_body in bodies.items()}
    if record["inherited"]:
        document["inherited"] = {
            target: {**known, "by": _first((release, release in known["by"]) for release in releases)}
            for target, known in record["inherited"].items()
        }
    document["cells"] = _table(_without_known(record["cells"], bodies), CELL)
    if record["beneath"]:
        document["beneath"] = _table(_without_known(record["beneath"], bodies), CELL)
    document["proofs"] = _table(record["proofs"], PROOF)
    document["parity"] = [
        {name: comparison[name] for name in PARITY} for comparison in sorted(record["parity"], key=_place)
    ]
    return laid_out({**document, "curve": record["curve"], "mutants": record["mutants"]}) + "\n"


def _table(answers: Iterable[Mapping[str, Any]], empty: Mapping[str, Any]) -> Table:
    answers = sorted(answers, key=_place)
    results = [{name: answer[name] for name in empty if answer[name] != empty[name]} for answer in answers]
    names = _names([answer["verdict"] for answer in answers], results)
    places: dict[str, dict[str, list[str]]] = {}
    keys: dict[str, dict[str, str]] = {}
    for answer, name in zip(answers, names, strict=True):
        release, stack = answer["release"], _stack(answer)
        run = name if answer["ran"] == release else f"{name}{RAN_ON}{answer['ran']}"
        places.setdefault(release, {}).setdefault(run, []).append(stack)
        keys.setdefault(stack, {})[release] = answer["key"]
    return {
        "places": {release: {run: " ".join(stacks) for run, stacks in row.items()} for release, row in places.items()},
        "keys": {stack: _first(of_stack.items()) for stack, of_stack in sorted(keys.items())},
        "results": dict(sorted(zip(names, results, strict=True), key=lambda named: named[0])),
    }


def _answers(table: Table, empty: Mapping[str, Any]) -> Iterator[Record]:
    keys: dict[str, str] = {}
    for release, row in table["places"].items():
        runs = {stack: run for run, stacks in row.items() for stack in stacks.split()}
        for stack in sorted(runs):
            name, _, ran = runs[stack].partition(RAN_ON)
            keys[stack] = table["keys"][stack].get(release) or keys[stack]
            own, _, transformers = stack.partition(IN_FRONT)
            in_front = {"transformers": transformers} if transformers else {}
            place = {"release": release, "stack": own, **in_front, "ran": ran or release, "key": keys[stack]}
            yield {**place, "verdict": _verdict(name), **empty, **table["results"][name]}


def _names(verdicts: Sequence[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each result: equal ones have the same, and a result that is new changes no other name."""
    texts = [json.dumps([verdict, result], sort_keys=True) for verdict, result in zip(verdicts, results, strict=True)]
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    # Four digits are enough for the few results of a patch. Should two begin with the same, all have more.
    digits = next(count for count in range(4, 65) if len({digest[:count] for digest in digests}) == len({*digests}))
    return [f"{verdict}-{digest[:digits]}" for verdict, digest in zip(verdicts, digests, strict=True)]


def _verdict(run: str) -> str:
    return run.partition(RAN_ON)[0].rpartition("-")[0]


def _stack(answer: Mapping[str, Any]) -> str:
    transformers = answer.get("transformers")
    return f"{answer['stack']}{IN_FRONT}{transformers}" if transformers else str(answer["stack"])


def _place(answer: Mapping[str, Any]) -> tuple[Version, str]:
    return Version(answer["release"]), _stack(answer)


def _cells(table: Table, bodies: Bodies) -> Iterator[Record]:
    """Give the cells with a result for each module, and with all bodies that they have seen."""
    of_releases = _by_release(bodies)
    for cell in _answers(table, CELL):
        leaves = {module: runs for names, runs in cell["leaves"].items() for module in names.split()}
        seen = {**_known_on(of_releases, cell["ran"]), **cell["bodies"]}
        yield {
            **cell,
            "leaves": _in_order(leaves, bodies),
            "bodies": {target: body for target, body in seen.items() if body != NOT_THERE},
        }


def _without_known(cells: Iterable[Mapping[str, Any]], bodies: Bodies) -> Iterator[Record]:
    """Give the cells with one result for the modules that have the same, and the bodies that are not on record."""
    of_releases = _by_release(bodies)
    for cell in cells:
        modules: dict[str, list[str]] = {}
        for module, runs in _in_order(cell["leaves"], bodies).items():
            modules.setdefault(json.dumps(runs), []).append(module)
        known = _known_on(of_releases, cell["ran"])
        seen = {**dict.fromkeys(known, NOT_THERE), **cell["bodies"]}
        yield {
            **cell,
            "leaves": {" ".join(names): json.loads(runs) for runs, names in modules.items()},
            "bodies": {target: body for target, body in seen.items() if body != known.get(target, NOT_THERE)},
        }


def _in_order(leaves: Mapping[str, Value], bodies: Bodies) -> dict[str, Value]:
    """Return ``leaves`` in the order of the targets."""
    modules = dict.fromkeys(target.partition(":")[0] for target in bodies)
    return {module: leaves[module] for module in [*modules, *leaves] if module in leaves}


def _by_release(bodies: Bodies) -> dict[str, dict[str, str]]:
    return {
        target: {release: body for body, known in by_body.items() for release in known["releases"]}
        for target, by_body in bodies.items()
    }


def _known_on(of_releases: Mapping[str, Mapping[str, str]], release: str) -> dict[str, str]:
    return {target: by_release.get(release, NOT_THERE) for target, by_release in of_releases.items()}


def _words(by_body: Mapping[str, Any], releases: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Give for each release the body and the verdict on it, such as ``c1:0 buggy``."""
    words = {
        release: " ".join([body, *([known["is"]] if "is" in known else [])])
        for body, known in by_body.items()
        for release in known["releases"]
    }
    return ((release, words.get(release)) for release in releases)


def _by_body(words: Iterable[tuple[str, str | None]]) -> dict[str, Record]:
    bodies: dict[str, Record] = {}
    for release, said in words:
        if said is not None:
            body, _, verdict = said.partition(" ")
            known = bodies.setdefault(body, {"releases": [], **({"is": verdict} if verdict else {})})
            known["releases"].append(release)
    return bodies


def _first(values: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return the value of each release that has another one than the release before it."""
    first: dict[str, Value] = {}
    last: Value | None = None
    for release, value in values:
        if value != last:
            first[release] = last = value
    return first


def _lasting(first: Mapping[str, Value], releases: Iterable[str]) -> Iterator[tuple[str, Value | None]]:
    """Give each release with its value: its own, or that of the release before it."""
    last: Value | None = None
    for release in releases:
        last = first.get(release, last)
        yield release, last


def laid_out(value: Any, indent: int = 0) -> str:
    """Return JSON with one entry a line. A list of numbers, and what is short and flat, is one line."""
    line = json.dumps(value)
    entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    flat = not any(isinstance(entry, (dict, list)) for entry in entries)
    numbers = isinstance(value, list) and all(isinstance(entry, (int, float)) for entry in entries)
    if not entries or (flat and (numbers or len(line) <= WIDTH)):
        return line
    parts = [laid_out(entry, indent + 1) for entry in entries]
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {part}" for name, part in zip(value, parts, strict=True)]
    margin = "\n" + " " * indent
    return line[0] + f"{margin} " + f",{margin} ".join(parts) + margin + line[-1]
