"""Which known bugs a set of pins brings, to some trainers or to the scripts beside the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name

from ..catalogue.conditions import Argument, Kind
from ..errors import LONG, ScriptError, plain, printable
from ..matching import gates
from ..matching.fingerprints import unproven
from ..matching.hits import Answer as HitAnswer
from ..matching.hits import Finding, finding
from ..matching.versions import VersionOf
from ..model import Bug as AnyBug
from ..reporting.sentences import repair_of
from ..scanning.files import files_to_scan
from ..scanning.found import NO_CELLS, TrainerCall, Trainers
from ..scanning.pins import line_of_trl, read_pins
from ..scanning.scripts import may_use_trl, read
from .audit_answer import Answer, Bug, Narrowed, answer_of, bug_of
from .progress import progress

_MOST_SCRIPTS = 500
"""Beside more scripts and notebooks than this the answer is for all trainers: that folder is no project."""


_Call = tuple[TrainerCall, str]
"""A trainer, and the script that makes it, if there is one."""

_NOTHING: tuple[list[_Call], Narrowed | None] = ([], None)


def audit_pins(
    path: Path, told: Mapping[str, str], patches: Sequence[AnyBug], trainers: Sequence[str], everything: bool
) -> Answer:
    """Return the bugs of the pinned TRL. Raises ``ScriptError`` for a file that pins none.

    ``trainers`` narrow it. Without them the scripts beside the file do, unless ``everything`` is asked for.
    """
    pins = {**read_pins(path), **told}
    trl = pins.get("trl")
    if trl is None:
        raise ScriptError(f"{plain(str(path))} does not pin trl to one version (as trl==0.16.1 does); --trl tells it")
    required = {canonicalize_name(name) for patch in patches for name in patch.requires}
    decisive: dict[str, str] = {"trl": trl, **{str(name): pins[name] for name in sorted(required) if name in pins}}
    calls, narrowed = _calls(path, trainers) if not everything else _NOTHING
    bugs = [bug for patch in patches if (bug := _bug(patch, trl, pins)) is not None]
    if narrowed is not None:
        by_id = {patch.id: patch for patch in patches}
        kept = [_narrowed(bug, by_id[bug["id"]], calls, trl, pins, bool(trainers)) for bug in bugs]
        narrowed["left_out"] = kept.count(None)
        bugs = [bug for bug in kept if bug is not None]
    return answer_of("pins", path, line_of_trl(path), trl, decisive, bugs, narrowed=narrowed)


def _version_of(pins: Mapping[str, str]) -> VersionOf:
    return lambda distribution: pins.get(canonicalize_name(distribution))


def _bug(patch: AnyBug, trl: str, pins: Mapping[str, str]) -> Bug | None:
    needs = [need for need in gates.requirements(patch, _version_of(pins)) if not need.met]
    if not gates.has_bug(trl, patch) or any(need.installed is not None for need in needs):
        return None
    unknown = [f"it needs {need.distribution} {need.specifiers}, which is not pinned" for need in needs]
    doubt = unproven(trl)
    unknown += [doubt] if doubt is not None else []
    answer = HitAnswer.CANNOT_TELL.value if unknown else "here"
    return bug_of(patch, answer, repair_of(patch), "pins", patch.title, (), unknown)


def _calls(path: Path, trainers: Sequence[str]) -> tuple[list[_Call], Narrowed | None]:
    """Return the trainers that narrow the answer, or None if nothing narrows it."""
    if trainers:
        named = [TrainerCall(name, f"{name}Trainer", 1, _unknown, NO_CELLS) for name in trainers]
        return [(call, "") for call in named], {
            "trainers": [call.called for call in named],
            "scripts": [],
            "uncertain": [],
            "left_out": 0,
        }
    # A pipe such as <(pip freeze) is in no folder of a project.
    try:
        files = files_to_scan([str(path.parent)]) if path.is_file() else []
    except ScriptError:
        files = []
    calls: list[_Call] = []
    scripts, uncertain = [], []
    files = files if len(files) <= _MOST_SCRIPTS else []
    with progress("scripts", len(files)) as advance:
        for number, (script, _) in enumerate(files):
            advance(number, printable(script.name, LONG))
            try:
                made, unseen, cells, _ = read(script) if may_use_trl(script) else Trainers([], [])
            except ScriptError as error:
                uncertain.append(str(error))
                continue
            calls += [(call, plain(str(script))) for call in made]
            scripts += [str(script)] if made else []
            uncertain += [f"{plain(str(script))}, {cells.position(line)}: {reason}" for line, reason in unseen]
    if not calls:
        return _NOTHING
    names = sorted({f"{call.name}Trainer" for call, _ in calls})
    return calls, {"trainers": names, "scripts": scripts, "uncertain": uncertain, "left_out": 0}


def _unknown(name: str) -> Argument:
    return Argument(Kind.UNKNOWN, reason="no script is read")


def _position(script: str, call: TrainerCall, line: int) -> str:
    return f"{script}, {call.position(line)}"


def _narrowed(
    bug: Bug, patch: AnyBug, calls: Sequence[_Call], trl: str, pins: Mapping[str, str], by_name: bool
) -> Bug | None:
    """Return the bug as these trainers have it, or None if it hits none of them.

    As in ``scan``, a patch that is off unless named repairs no bug of those who do not name it.
    """
    if bug["repaired"] == "if named":
        return None
    version_of = _version_of(pins)
    found = [
        finding(
            *(call.name, call.argument, patch, trl),
            version_of=version_of,
            is_known=lambda distribution: version_of(distribution) is not None,
            position=partial(_position, script, call),
        )
        for call, script in calls
    ]
    hit = next((one for one in found if one.answer is HitAnswer.HIT), None)
    unsure = next((one for one in found if one.answer is HitAnswer.CANNOT_TELL), None)
    if hit is None and unsure is None:
        return None
    if by_name or bug["answer"] == HitAnswer.CANNOT_TELL.value:
        return bug
    decisive: Finding | None = hit or unsure
    assert decisive is not None
    return {
        **bug,
        "answer": decisive.answer.value,
        "symptom": decisive.symptom,
        "because": list(decisive.because),
        "unknown": list(decisive.unknown),
        "source": "scripts",
    }
