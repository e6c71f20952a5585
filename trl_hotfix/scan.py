"""Which known bugs do a trainer and its arguments hit? What a bug needs is data: ``hits`` in ``patches.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from .catalogue import conditions
from .catalogue.conditions import Argument, Kind
from .matching import gates, versions
from .matching.fingerprints import bodies
from .model import Hit, Patch, Severity
from .scripts import TrainerCall


class Answer(str, Enum):
    HIT = "hit"
    CANNOT_TELL = "cannot tell"
    NOT_HIT = "not hit"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a script says of one bug. ``because`` is what makes it so; ``unknown`` is why nobody can tell from it.

    ``lines`` are those of the arguments that decide, or of the trainer.
    """

    patch: Patch
    answer: Answer
    symptom: str
    lines: tuple[int, ...]
    because: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scanned:
    """A trainer of a script: the bugs that it hits, worst first, those that cannot be told, and how many are left."""

    made: TrainerCall
    hits: tuple[Finding, ...]
    unsure: tuple[Finding, ...]
    rest: int


def judge(made: TrainerCall, patches: Iterable[Patch], trl: str, *, elsewhere: bool = False) -> Scanned:
    """Each of ``patches`` for one trainer on the release ``trl``.

    ``elsewhere`` if that is not what is installed here: a requirement that is not met here may be met there.
    """
    found = [_finding(made, patch, trl, elsewhere) for patch in patches]
    worst = list(Severity).index
    found.sort(key=lambda each: (worst(each.patch.severity), each.patch.id))
    hits = tuple(each for each in found if each.answer is Answer.HIT)
    unsure = tuple(each for each in found if each.answer is Answer.CANNOT_TELL)
    return Scanned(made, hits, unsure, len(found) - len(hits) - len(unsure))


def _finding(made: TrainerCall, patch: Patch, trl: str, elsewhere: bool) -> Finding:
    """The best answer of the ways into the bug: a hit, before one that cannot be told."""
    ways = [each for hit in patch.hits if (each := _way(made, patch, hit, trl)) is not None]
    if not ways:
        # A patch that says nothing of what it needs is none that a script can be cleared of.
        silent = not patch.hits and _in(trl, patch.trl) is not False
        unknown = ("the patch does not say what its bug needs",) if silent else ()
        answer = Answer.CANNOT_TELL if silent else Answer.NOT_HIT
        return Finding(patch, answer, patch.title, (made.line,), (), unknown)
    here = [each for each in ways if each.answer is Answer.HIT] or ways
    unmet = [each for each in gates.requirements(patch, versions.installed) if not each.met]
    if unmet and not elsewhere:
        return Finding(patch, Answer.NOT_HIT, patch.title, (made.line,), (), ())
    said = tuple(f"needs {each.distribution} {each.wanted}, and here is {each.found or 'none'}" for each in unmet)
    return Finding(
        patch,
        Answer.CANNOT_TELL if said else here[0].answer,
        _joined(each.symptom for each in here),
        tuple(sorted({line for each in here for line in each.lines})),
        tuple(dict.fromkeys(reason for each in here for reason in each.because)),
        (*dict.fromkeys(reason for each in here for reason in each.unknown), *said),
    )


def _way(made: TrainerCall, patch: Patch, hit: Hit, trl: str) -> Finding | None:
    """One way into a bug; None if the script does not go it."""
    if "*" not in hit.trainers and made.name not in hit.trainers:
        return None
    in_range = _in(trl, patch.trl, hit.trl)
    if in_range is False:
        return None
    because: list[str] = []
    unknown: list[str] = []
    lines: list[int] = []
    for name, wanted in hit.when.items():
        argument = made.argument(name)
        answer = conditions.evaluate(wanted, argument, made.argument)
        if answer is False:
            return None
        if argument.line is not None:
            lines.append(argument.line)
        if answer is None:
            unknown.append(_unknown(name, argument))
        else:
            because.append(argument.said(name))
    if hit.depends is not None:
        unknown.append(f"if {hit.depends}")
    if in_range is None:
        unknown.append(f"TRL {trl} is no release")
    answer_ = Answer.CANNOT_TELL if unknown else Answer.HIT
    return Finding(patch, answer_, hit.symptom, tuple(lines) or (made.line,), tuple(because), tuple(unknown))


def _in(trl: str, *ranges: str | None) -> bool | None:
    """None for a development version on the border: 1.10.0.dev0 may have what 1.10.0 has, or 1.9.2."""
    releases = {trl}
    if Version(trl).is_devrelease:
        base = Version(trl).base_version
        releases = {base, *[each for each in bodies().releases if Version(each) < Version(base)][-1:]}
    answers = {all(versions.in_range(each, wanted) for wanted in ranges if wanted is not None) for each in releases}
    return answers.pop() if len(answers) == 1 else None


def _unknown(name: str, argument: Argument) -> str:
    if argument.kind is Kind.UNKNOWN:
        at = f": line {argument.line}" if argument.line is not None else ""
        return f"{name} is not a literal ({argument.why}){at}"
    return f"{argument.said(name)} is not a literal"


def _joined(symptoms: Iterable[str]) -> str:
    return "; or ".join(dict.fromkeys(symptoms))
