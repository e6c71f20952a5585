"""The shape of ``audit --json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from .. import __version__
from ..matching.hits import Answer as HitAnswer
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import fixed_in_layers
from .accepted import IgnoreProblem, Ignores


class Bug(TypedDict):
    """A known bug. ``answer`` is "here" for pins, which have the bug; beside scripts and for a run it is "hit".

    It is "cannot tell" where something is unknown. ``repaired``: "by default", "if named" or, for a run, the word of
    its record; "no" if the record lacks the patch; "none" if there is no patch. ``run_repairs``: whether a run would
    repair it, by ``--policy`` or the environment; null if nobody asks. ``layer`` is the distribution beneath TRL that
    has the bug; null: TRL. ``harm`` is what a run with the bug leaves behind, such as "scale", and ``retrain`` whether
    to train its model again. ``fixed_in`` is the first release of TRL with the fix, if there is one, and
    ``fixed_in_layers`` the first without the bug of each other distribution, such as ``{"transformers": "5.3"}``;
    ``>0.18.3`` if only 0.18.3 has it. ``source`` of the answer: "pins", the "files" of a run, its "record" or
    "scripts".
    """

    id: str
    title: str
    severity: str
    harm: str | None
    retrain: str | None
    answer: str
    repaired: str
    run_repairs: bool | None
    layer: str | None
    fixed_in: str | None
    fixed_in_layers: dict[str, str]
    symptom: str
    because: list[str]
    unknown: list[str]
    source: str


class Accepted(Bug):
    """A bug that the user accepts. ``accepted_by`` names the place."""

    reason: str
    accepted_by: str


class Narrowed(TypedDict):
    """The trainers that narrow the answer for pins, the scripts that make them, and how many bugs they leave out.

    ``uncertain`` has the places of scripts that may make more trainers, and the scripts that cannot be read.
    """

    trainers: list[str]
    scripts: list[str]
    uncertain: list[str]
    left_out: int


class Answer(TypedDict):
    """What ``audit --json`` prints. ``kind`` is "pins" or "run"; ``versions`` are those that decide.

    ``line`` is the line of the pin of TRL. ``narrowed`` is null where nothing narrows the answer.
    """

    trl_hotfix: str
    kind: str
    path: str
    line: int
    trl: str
    versions: dict[str, str]
    trainer: str | None
    narrowed: Narrowed | None
    has_record: bool
    bugs: list[Bug]
    accepted: list[Accepted]
    ignores: list[IgnoreProblem]


CANNOT_TELL = HitAnswer.CANNOT_TELL.value


def bug_of(
    patch: AnyBug,
    answer: str,
    repaired: str,
    source: str,
    symptom: str,
    because: Sequence[str],
    unknown: Sequence[str],
) -> Bug:
    return {
        "id": patch.id,
        "title": patch.title,
        "severity": patch.severity.value,
        "harm": patch.harm.value if patch.harm is not None else None,
        "retrain": patch.retrain,
        "answer": answer,
        "repaired": repaired,
        "run_repairs": None,
        "layer": patch.layer,
        "fixed_in": patch.upstream.fixed_in,
        "fixed_in_layers": fixed_in_layers(patch),
        "symptom": symptom,
        "because": list(because),
        "unknown": list(unknown),
        "source": source,
    }


def answer_of(
    kind: str,
    path: Path,
    line: int,
    trl: str,
    decisive: dict[str, str],
    bugs: list[Bug],
    *,
    trainer: str | None = None,
    has_record: bool = False,
    narrowed: Narrowed | None = None,
) -> Answer:
    """Return the answer, with certain bugs first and the most severe ones before others."""
    ranks = [severity.value for severity in Severity]
    bugs.sort(key=lambda bug: (bug["answer"] == CANNOT_TELL, ranks.index(bug["severity"]), bug["id"]))
    return {
        "trl_hotfix": __version__,
        "kind": kind,
        "path": str(path),
        "line": line,
        "trl": trl,
        "versions": decisive,
        "trainer": trainer,
        "narrowed": narrowed,
        "has_record": has_record,
        "bugs": bugs,
        "accepted": [],
        "ignores": [],
    }


def accept(answer: Answer, ignores: Ignores) -> None:
    """Move what the user accepts out of the bugs, and note the ignores that need a change."""
    ignored = ignores.of_project(Path(answer["path"]))
    for bug in [bug for bug in answer["bugs"] if bug["id"] in ignored]:
        ignore = ignored[bug["id"]]
        ignores.accept(ignore)
        answer["bugs"].remove(bug)
        answer["accepted"].append({**bug, "reason": ignore.reason, "accepted_by": ignore.place})
    answer["ignores"] = ignores.problems()
