"""What the relations found in a release: ``evidence/relations/<release>.json``, of which their page is made.

By trainer and relation a file has how many claims hold, which are violated and by how much, which runs failed, and why
a claim cannot be asked. ``on`` is with the patches, ``off`` without them, and what both have is under ``on off``:

    "violated": {"on off": {"plain = batch_size=4 accumulation=2": ["loss of step 1", 0.06, 0.013, 0.78, "gradient"]}}

The largest difference has its two numbers, and how far apart they are. The others have the beginnings of their names,
by which the ledger finds a cause. No file has a cause: it is in the ledger of today.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue.evidence_file import laid_out
from trl_hotfix.relations.cells import ERROR, HOLDS, UNASKED, VIOLATED

from bench.releases.layout import CHECKOUT

FOLDER = CHECKOUT / "evidence" / "relations"
STATES = (HOLDS, VIOLATED, ERROR, UNASKED)
WAYS = {True: "on", False: "off"}
CLAIMS = "claims"
"""What is counted of the claims that hold."""

Answer = Mapping[str, Any]


def texts(answers: Sequence[Answer], folder: Path) -> dict[Path, str]:
    """Return the text of each record with these answers, by its file.

    They take the place of those about the same trainer and relation, asked the same way. Others stay on record.
    """
    found = {}
    for place in dict.fromkeys(answer["place"] for answer in answers):
        path = folder / f"{place.partition('@')[0]}.json"
        new = [short(answer) for answer in answers if answer["place"] == place]
        asked = {_subject(answer) for answer in new}
        old = [one for one in read(path) if one["place"] == place and _subject(one) not in asked]
        found[path] = text([*old, *new])
    return found


def _subject(answer: Answer) -> tuple[bool, str, str]:
    return answer["on"], answer["cell"]["trainer"], answer["cell"]["relation"]


def read(path: Path) -> list[Answer]:
    """Return the answers on record in a file, and none if it is not there."""
    return list(answers_of(json.loads(path.read_text(encoding="utf-8")))) if path.is_file() else []


def read_all(folder: Path = FOLDER) -> list[Answer]:
    """Return all answers on record."""
    return [answer for path in sorted(folder.glob("*.json")) for answer in read(path)]


def subjects() -> set[tuple[str, bool, str]]:
    """Return who is on record: the place, whether the patches are on, and the trainer."""
    return {(answer["place"], answer["on"], answer["cell"]["trainer"]) for answer in read_all()}


def short(answer: Answer) -> Answer:
    """Return what a record keeps of an answer. The largest difference comes first, and it alone has numbers."""
    cell = answer["cell"]
    differences = []
    if cell["differences"]:
        largest = max(cell["differences"], key=_apart)
        names = dict.fromkeys(beginning(each["what"]) for each in cell["differences"])
        numbers = (_rounded(largest[name]) for name in ("left", "right", "apart"))
        others = [name for name in names if name != beginning(largest["what"])]
        differences = _differences([largest["what"], *numbers, *others])
    kept = {name: cell[name] for name in ("trainer", "relation", "setting", "state", "why")}
    return {"place": answer["place"], "on": answer["on"], "cell": {**kept, "differences": differences}}


def _apart(difference: Mapping[str, Any]) -> float:
    # What is not finite is null in JSON.
    return math.inf if difference["apart"] is None else float(difference["apart"])


def beginning(what: str) -> str:
    """Return what differs without its step, and of names such as ``rewards/chosen`` the part that they share."""
    name = what.removeprefix("evaluation: ").partition(" of step ")[0].removesuffix(": norm")
    head, slash, _ = name.partition("/")
    return head + slash


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def text(answers: Iterable[Answer]) -> str:
    """Return the text of a file. Its answers are as ``short`` makes them."""
    trainers: dict[str, dict[str, list[Answer]]] = {}
    place = ""
    for answer in answers:
        place, cell = answer["place"], answer["cell"]
        trainers.setdefault(cell["trainer"], {}).setdefault(cell["relation"], []).append(answer)
    entries = {
        trainer: {relation: _entry(found) for relation, found in sorted(relations.items())}
        for trainer, relations in sorted(trainers.items())
    }
    return laid_out({"place": place, "trainers": entries}) + "\n"


def _entry(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what is written of a trainer and a relation: by state and by way what was asked, and its answer."""
    entry: dict[str, Any] = {}
    for state in STATES:
        of_state = [answer for answer in answers if answer["cell"]["state"] == state]
        by_way = {way: _facts(state, [one["cell"] for one in of_state if one["on"] is on]) for on, way in WAYS.items()}
        for subject in dict.fromkeys(subject for facts in by_way.values() for subject in facts):
            for ways, fact in _by_ways(subject, by_way).items():
                entry.setdefault(state, {}).setdefault(ways, {})[subject] = fact
    return entry


def _facts(state: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if state == VIOLATED:
        return {cell["setting"]: _row(cell["differences"]) for cell in cells}
    if state == ERROR:
        return {cell["setting"]: cell["why"] for cell in cells}
    return dict(Counter(cell["why"] if state == UNASKED else CLAIMS for cell in cells))


def _by_ways(subject: str, by_way: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answers about a subject, each under the ways that have it, such as ``on off``."""
    ways: dict[str, list[str]] = {}
    facts = {way: facts[subject] for way, facts in by_way.items() if subject in facts}
    for way, fact in facts.items():
        ways.setdefault(json.dumps(fact), []).append(way)
    return {" ".join(same): facts[same[0]] for same in ways.values()}


def _row(differences: Sequence[Mapping[str, Any]]) -> list[Any]:
    largest, *others = differences
    return [*(largest[name] for name in ("what", "left", "right", "apart")), *(other["what"] for other in others)]


def answers_of(document: Mapping[str, Any]) -> Iterator[Answer]:
    """Give the answers of a file, as ``short`` makes them. What is only counted has no setting."""
    for trainer, relations in document["trainers"].items():
        for relation, entry in relations.items():
            for state, by_ways in entry.items():
                for ways, facts in by_ways.items():
                    cells = [cell for subject, fact in facts.items() for cell in _cells(state, subject, fact)]
                    for way in ways.split():
                        for cell in cells:
                            named = {"trainer": trainer, "relation": relation, "state": state, **cell}
                            yield {"place": document["place"], "on": way == WAYS[True], "cell": named}


def _cells(state: str, subject: str, fact: Any) -> Iterator[dict[str, Any]]:
    if state == VIOLATED:
        yield {"setting": subject, "why": "", "differences": _differences(fact)}
    elif state == ERROR:
        yield {"setting": subject, "why": fact, "differences": []}
    else:
        for _ in range(fact):
            yield {"setting": "", "why": subject if state == UNASKED else "", "differences": []}


def _differences(row: Sequence[Any]) -> list[dict[str, Any]]:
    what, left, right, apart, *others = row
    largest = {"what": what, "left": left, "right": right, "apart": apart}
    return [largest, *({"what": name, "left": None, "right": None, "apart": None} for name in others)]
