"""Whether a trainer hits a known bug, by its arguments: the conditions are data, ``hits`` in ``patches.yaml``.

The arguments are those of a call in a script (``scanning``) or of a real trainer (``recording``).
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from packaging.version import Version

from ..catalogue import conditions
from ..catalogue.conditions import Argument, Kind, Lookup
from ..model import Bug, Hit
from . import gates, versions
from .fingerprints import bodies

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

    ``because`` has the conditions that hold; ``unknown`` has those that cannot be told. ``lines`` are those of the
    deciding arguments in a script.
    """

    patch: Bug
    answer: Answer
    symptom: str
    lines: tuple[int, ...]
    because: tuple[str, ...]
    unknown: tuple[str, ...]


def finding(
    trainer: str,
    argument: Lookup,
    patch: Bug,
    trl: str,
    *,
    other_release: bool = False,
    version_of: versions.VersionOf = versions.installed,
    fact: Lookup | None = None,
) -> Finding:
    """Tell whether a trainer, by its name without ``Trainer``, hits the bug of ``patch`` on the release ``trl``.

    ``patch`` may be a bug without a repair. Of several ways into a bug, those that cannot be told do not count if one
    is a hit. ``other_release``: ``trl`` is not the installed release. A requirement that is not met here may be met
    beside it. ``version_of`` has the versions of other distributions, ``fact`` what is known of the model's files.
    """
    ways = [
        finding for hit in patch.hits if (finding := _way_into(trainer, argument, patch, hit, trl, fact)) is not None
    ]
    if not ways:
        # A patch that declares no conditions does not clear a script of its bug.
        undeclared = not patch.hits and _in_range(trl, patch.trl) is not False
        unknown = ("the patch does not say what its bug needs",) if undeclared else ()
        answer = Answer.CANNOT_TELL if undeclared else Answer.NOT_HIT
        return Finding(patch, answer, patch.title, (), (), unknown)
    unmet = [requirement for requirement in gates.requirements(patch, version_of) if not requirement.met]
    if unmet and not other_release:
        return Finding(patch, Answer.NOT_HIT, patch.title, (), (), ())
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


def _way_into(
    trainer: str, lookup: Lookup, patch: Bug, hit: Hit, trl: str, fact: Lookup | None = None
) -> Finding | None:
    """Judge one way into a bug. Return None if the trainer does not take it."""
    if "*" not in hit.trainers and trainer not in hit.trainers:
        return None
    in_range = _in_range(trl, patch.trl, hit.trl)
    if in_range is False:
        return None
    because: list[str] = []
    unknown: list[str] = []
    lines: list[int] = []
    for name, condition in hit.when.items():
        argument = lookup(name)
        holds = conditions.evaluate(condition, argument, lookup)
        if holds is False:
            return None
        if argument.line is not None:
            lines.append(argument.line)
        if holds is None:
            unknown.append(_describe_unknown(name, argument))
        else:
            because.append(argument.describe(name))
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
    return Finding(
        patch=patch,
        answer=Answer.CANNOT_TELL if unknown else Answer.HIT,
        symptom=hit.symptom,
        lines=tuple(lines),
        because=tuple(because),
        unknown=tuple(unknown),
    )


def _settled(hit: Hit, fact: Lookup) -> bool | None:
    """Return whether what ``depends`` says is so, or None if the facts do not tell."""
    answer: bool | None = True
    for name, condition in hit.facts.items():
        holds = conditions.evaluate(condition, fact(name), fact)
        if holds is False:
            return False
        answer = holds if answer else None
    return answer


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


def _describe_unknown(name: str, argument: Argument) -> str:
    if argument.kind is Kind.UNKNOWN:
        location = f": line {argument.line}" if argument.line is not None else ""
        return f"{name} is not a literal ({argument.reason}){location}"
    return f"{argument.describe(name)} is not a literal"
