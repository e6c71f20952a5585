"""Whether a trainer hits a known bug, by its arguments: the conditions are data, ``hits`` in ``patches.yaml``.

The arguments come from a call in a script (``scanning``) or from a real trainer (``recording``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from packaging.version import Version

from ..catalogue import conditions
from ..catalogue.conditions import Argument, Kind, Lookup, Position, line_in_words
from ..model import Bug, Hit
from . import gates, versions
from .fingerprints import bodies, unproven

TRAINER_ONLY_ARGUMENTS = frozenset(
    {"model", "ref_model", "teacher_model", "peft_config", "quantization_config", "tokenizer", "processing_class"}
    | {"train_dataset", "eval_dataset", "formatting_func", "data_collator", "callbacks", "reward_funcs"}
    | {"compute_loss_func", "compute_metrics", "optimizers", "train"}
)
"""Arguments of trainers that no config has: they are known even if the config is unknown.

``train.resume_from_checkpoint`` is the argument of ``trainer.train()``.
"""


class Answer(str, Enum):
    """Is a trainer hit by a bug?"""

    HIT = "hit"
    CANNOT_TELL = "cannot tell"
    NOT_HIT = "not hit"


class Finding(Struct, frozen=True):
    """The answer for one bug.

    ``because`` has the conditions that hold; ``unknown`` has those that we cannot tell. ``lines`` has the lines of
    the deciding arguments in a script, and ``places`` has all of their places in words, also in other files.
    """

    patch: Bug
    answer: Answer
    symptom: str
    lines: tuple[int, ...]
    because: tuple[str, ...]
    unknown: tuple[str, ...]
    places: tuple[str, ...] = ()


def finding(
    trainer: str,
    argument: Lookup,
    patch: Bug,
    trl: str,
    *,
    version_of: versions.VersionOf = versions.installed,
    is_known: Callable[[str], bool] = lambda distribution: True,
    fact: Lookup | None = None,
    position: Position = line_in_words,
) -> Finding:
    """Tell whether a trainer, by its name without ``Trainer``, hits the bug of ``patch`` on the release ``trl``.

    ``patch`` may be a bug without a repair. Of several ways into a bug, the unknown ones do not count if one is a
    hit. ``version_of`` has the versions of other distributions. ``is_known``: that version is the one beside this
    TRL, or it is not installed there; otherwise a requirement that is not met here may be met there. ``fact`` is what
    is known of the model's files. ``position`` names a line of the script.
    """
    ways = [way for hit in patch.hits if (way := _way_into(trainer, argument, patch, hit, trl, fact, position))]
    if not ways:
        # A patch that declares no conditions does not clear a script of its bug.
        undeclared = not patch.hits and _in_range(trl, patch.trl) is not False
        unknown = ("the patch does not say what its bug needs",) if undeclared else ()
        answer = Answer.CANNOT_TELL if undeclared else Answer.NOT_HIT
        return Finding(patch, answer, patch.title, (), (), unknown)
    unmet = [requirement for requirement in gates.requirements(patch, version_of) if not requirement.met]
    if any(is_known(requirement.distribution) for requirement in unmet):
        return Finding(patch, Answer.NOT_HIT, patch.title, (), (), ())
    needs = tuple(map(_describe_need, unmet))
    sure = [way for way in ways if way.finding.answer is Answer.HIT] or ways
    best = [way.finding for way in sure]
    unclear = {name: argument for way in sure for name, argument in way.unclear}
    lines = tuple(sorted({line for finding in best for line in finding.lines}))
    places = [*map(position, lines), *(place for finding in best for place in finding.places)]
    return Finding(
        patch,
        Answer.CANNOT_TELL if needs else best[0].answer,
        "; or ".join(dict.fromkeys(finding.symptom for finding in best)),
        lines,
        tuple(dict.fromkeys(reason for finding in best for reason in finding.because)),
        (
            *_describe_unknown(unclear, position),
            *dict.fromkeys(reason for finding in best for reason in finding.unknown),
            *needs,
        ),
        tuple(dict.fromkeys(places)),
    )


def doubted(found: Finding, trl: str) -> Finding:
    """Return the finding, and for a hit on a TRL that nobody has proved the patches on: cannot tell."""
    doubt = unproven(trl)
    if doubt is None or found.answer is not Answer.HIT:
        return found
    return replace(found, answer=Answer.CANNOT_TELL, unknown=(*found.unknown, doubt))


class _Way(NamedTuple):
    """A way into a bug, and the arguments that cannot decide it, by their names."""

    finding: Finding
    unclear: list[tuple[str, Argument]]


def _way_into(
    trainer: str, lookup: Lookup, patch: Bug, hit: Hit, trl: str, fact: Lookup | None, position: Position
) -> _Way | None:
    """Judge one way into a bug. Return None if the trainer does not take it. Its ``places`` are those elsewhere."""
    if "*" not in hit.trainers and trainer not in hit.trainers:
        return None
    in_range = _in_range(trl, patch.trl, hit.trl)
    if in_range is False:
        return None
    because: list[str] = []
    unclear: list[tuple[str, Argument]] = []
    decisive: list[Argument] = []
    for name, condition in hit.when.items():
        argument = lookup(name)
        holds = conditions.evaluate(condition, argument, lookup)
        if holds is False:
            return None
        decisive.append(argument)
        if holds is None:
            unclear.append((name, argument))
        else:
            because.append(argument.describe(name, position))
    unknown: list[str] = []
    if hit.depends is not None:
        settled = _settled(hit, fact) if fact is not None and hit.facts else None
        if settled is False:
            return None
        if settled and fact is not None:
            because += [_describe_fact(name, fact(name)) for name in hit.facts]
        else:
            unknown.append(f"if {hit.depends}")
    if in_range is None:
        unknown.append(f"TRL {trl} is no release")
    found = Finding(
        patch=patch,
        answer=Answer.CANNOT_TELL if unknown or unclear else Answer.HIT,
        symptom=hit.symptom,
        lines=tuple(argument.line for argument in decisive if argument.line is not None and not argument.place),
        because=tuple(because),
        unknown=tuple(unknown),
        places=tuple(argument.place for argument in decisive if argument.place),
    )
    return _Way(found, unclear)


def _settled(hit: Hit, fact: Lookup) -> bool | None:
    """Return whether what ``depends`` says is so, or None if the facts do not tell."""
    answer: bool | None = True
    for name, condition in hit.facts.items():
        holds = conditions.evaluate(condition, fact(name), fact)
        if holds is False:
            return False
        answer = holds if answer else None
    return answer


def _describe_need(requirement: gates.Requirement) -> str:
    here = f" ({requirement.installed} is installed here)" if requirement.installed is not None else ""
    return f"needs {requirement.distribution} {requirement.specifiers}, and its version is not known{here}"


def _describe_fact(name: str, argument: Argument) -> str:
    return f"{argument.describe(name)} ({argument.reason})"


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


def _describe_unknown(unclear: Mapping[str, Argument], position: Position) -> list[str]:
    """Describe the arguments that cannot decide. A construction that leaves several unknown gives its reason once."""
    names: dict[str, list[str]] = {}
    described = []
    for name, argument in unclear.items():
        if argument.kind is not Kind.UNKNOWN:
            end = "may be the default, or given" if argument.may_be_default else "is compared with what is unknown"
            described.append(f"{argument.describe(name, position)} {end}")
        elif argument.alternatives:
            values = dict.fromkeys(one.describe(name, position) for one in argument.alternatives)
            described.append(f"{' or '.join(values)}: {argument.reason}{argument.where(position)}")
        else:
            names.setdefault(f"{argument.reason}{argument.where(position)}", []).append(name)
    grouped = [
        f"{' and '.join(of_reason)} {'are' if len(of_reason) > 1 else 'is'} unknown: {reason}"
        for reason, of_reason in names.items()
    ]
    return [*grouped, *described]
