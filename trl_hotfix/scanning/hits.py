"""Which known bugs a trainer call hits. The conditions of each bug are data: ``hits`` in ``patches.yaml``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from ..catalogue import conditions
from ..catalogue.conditions import Argument, Kind
from ..matching import gates, versions
from ..matching.fingerprints import bodies
from ..model import Hit, Patch, Severity
from .trainer_calls import TrainerCall


class Answer(str, Enum):
    """Is a trainer call hit by a bug?"""

    HIT = "hit"
    CANNOT_TELL = "cannot tell"
    NOT_HIT = "not hit"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer for one bug.

    ``because`` has the conditions that hold; ``unknown`` has those that the script does not tell. ``lines`` are those
    of the deciding arguments, or that of the trainer if there are none.
    """

    patch: Patch
    answer: Answer
    symptom: str
    lines: tuple[int, ...]
    because: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScannedTrainer:
    """A trainer call, with the bugs that it hits and those that cannot be told, the most severe first.

    ``not_hit`` is the number of all other known bugs.
    """

    call: TrainerCall
    hits: tuple[Finding, ...]
    unsure: tuple[Finding, ...]
    not_hit: int


def judge(call: TrainerCall, patches: Iterable[Patch], trl: str, *, other_release: bool = False) -> ScannedTrainer:
    """Judge a trainer call by the bugs of ``patches`` on the release ``trl``.

    ``other_release``: ``trl`` is not the installed release. A requirement that is not met here may be met beside it.
    """
    findings = [_finding(call, patch, trl, other_release) for patch in patches]
    rank = list(Severity).index
    findings.sort(key=lambda finding: (rank(finding.patch.severity), finding.patch.id))
    hits = tuple(finding for finding in findings if finding.answer is Answer.HIT)
    unsure = tuple(finding for finding in findings if finding.answer is Answer.CANNOT_TELL)
    return ScannedTrainer(call, hits, unsure, len(findings) - len(hits) - len(unsure))


def _finding(call: TrainerCall, patch: Patch, trl: str, other_release: bool) -> Finding:
    """Combine the ways into a bug. If one is a hit, those that cannot be told do not count."""
    ways = [finding for hit in patch.hits if (finding := _way_into(call, patch, hit, trl)) is not None]
    if not ways:
        # A patch that declares no conditions does not clear a script of its bug.
        undeclared = not patch.hits and _in_range(trl, patch.trl) is not False
        unknown = ("the patch does not say what its bug needs",) if undeclared else ()
        answer = Answer.CANNOT_TELL if undeclared else Answer.NOT_HIT
        return Finding(patch, answer, patch.title, (call.line,), (), unknown)
    unmet = [requirement for requirement in gates.requirements(patch, versions.installed) if not requirement.met]
    if unmet and not other_release:
        return Finding(patch, Answer.NOT_HIT, patch.title, (call.line,), (), ())
    needs = tuple(
        f"needs {requirement.distribution} {requirement.specifiers}, and here is {requirement.installed or 'none'}"
        for requirement in unmet
    )
    best = [finding for finding in ways if finding.answer is Answer.HIT] or ways
    return Finding(
        patch,
        Answer.CANNOT_TELL if needs else best[0].answer,
        "; or ".join(dict.fromkeys(finding.symptom for finding in best)),
        tuple(sorted({line for finding in best for line in finding.lines})),
        tuple(dict.fromkeys(reason for finding in best for reason in finding.because)),
        (*dict.fromkeys(reason for finding in best for reason in finding.unknown), *needs),
    )


def _way_into(call: TrainerCall, patch: Patch, hit: Hit, trl: str) -> Finding | None:
    """Judge one way into a bug. Return None if the call does not take it."""
    if "*" not in hit.trainers and call.name not in hit.trainers:
        return None
    in_range = _in_range(trl, patch.trl, hit.trl)
    if in_range is False:
        return None
    because: list[str] = []
    unknown: list[str] = []
    lines: list[int] = []
    for name, condition in hit.when.items():
        argument = call.argument(name)
        holds = conditions.evaluate(condition, argument, call.argument)
        if holds is False:
            return None
        if argument.line is not None:
            lines.append(argument.line)
        if holds is None:
            unknown.append(_describe_unknown(name, argument))
        else:
            because.append(argument.describe(name))
    if hit.depends is not None:
        unknown.append(f"if {hit.depends}")
    if in_range is None:
        unknown.append(f"TRL {trl} is no release")
    return Finding(
        patch=patch,
        answer=Answer.CANNOT_TELL if unknown else Answer.HIT,
        symptom=hit.symptom,
        lines=tuple(lines) or (call.line,),
        because=tuple(because),
        unknown=tuple(unknown),
    )


def _in_range(trl: str, *ranges: str | None) -> bool | None:
    """Is the release in all ranges? None for a development version at the limit of one.

    1.10.0.dev0 may have the code of 1.10.0, or still that of 1.9.2.
    """
    releases = {trl}
    if Version(trl).is_devrelease:
        base = Version(trl).base_version
        older = [release for release in bodies().releases if Version(release) < Version(base)]
        releases = {base, *older[-1:]}
    specifiers = [specifier for specifier in ranges if specifier is not None]
    answers = {all(versions.in_range(version, specifier) for specifier in specifiers) for version in releases}
    return answers.pop() if len(answers) == 1 else None


def _describe_unknown(name: str, argument: Argument) -> str:
    if argument.kind is Kind.UNKNOWN:
        location = f": line {argument.line}" if argument.line is not None else ""
        return f"{name} is not a literal ({argument.reason}){location}"
    return f"{argument.describe(name)} is not a literal"
