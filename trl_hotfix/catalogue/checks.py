"""Check an entry whose types are right: ids, ranges, targets and hits. ``functions`` looks into the patch's module."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..errors import Mistake, suggestion
from ..model import Bug, Hit, KnownBug, Option, Patch, Target
from . import conditions
from .facts import FACTS

ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
CHOICE = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*\Z")
TRAINER = re.compile(r"[A-Z]\w*\Z")
ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?\Z")
MODULE = re.compile(r"trl(\.[A-Za-z_]\w*)+\Z")


def check(patch: Patch, line_of: Callable[..., int]) -> Iterator[Mistake]:
    """Yield every mistake in an entry whose types are right."""
    yield from _check_bug(patch, line_of)
    if patch.revision < 1:
        yield Mistake(line_of("revision"), f"revision {patch.revision} is less than 1")
    for index, name in enumerate(patch.formerly):
        if not ID.match(name):
            yield Mistake(line_of("formerly", index), f"formerly: {name!r} is not lower-case words joined by '-'")
    for name in patch.options:
        yield from _check_option(name, patch.options[name], functools.partial(line_of, "options", name))
    if not patch.targets:
        yield Mistake(line_of("targets"), "targets is empty: a patch wraps at least one method or function")
    for index, target in enumerate(patch.targets):
        yield from _check_target(target, index, line_of)


def check_known_bug(bug: KnownBug, line_of: Callable[..., int], patch_ids: Collection[str]) -> Iterator[Mistake]:
    """Yield every mistake in an entry of ``known.yaml`` whose types are right."""
    yield from _check_bug(bug, line_of)
    if bug.id in patch_ids:
        yield Mistake(line_of("id"), f"id {bug.id!r} belongs to a patch in patches.yaml: delete the entry here")
    if not bug.hits:
        yield Mistake(line_of("hits"), "hits is empty: an entry without a repair is there to tell who is hit")


def _check_bug(bug: Bug, line_of: Callable[..., int]) -> Iterator[Mistake]:
    """Yield every mistake in what entries with a repair and without one have in common."""
    if not ID.match(bug.id):
        yield Mistake(line_of("id"), f"id {bug.id!r} is not lower-case words joined by '-'")
    yield from check_range(bug.trl, "trl", line_of("trl"))
    yield from _check_review(bug, line_of)
    for distribution, specifiers in bug.requires.items():
        yield from check_range(specifiers, f"requires {distribution}", line_of("requires", distribution))
    if (bug.harm is None) != (bug.retrain is None):
        given, lacking = ("harm", "retrain") if bug.harm is not None else ("retrain", "harm")
        yield Mistake(line_of(given), f"{given} is given without {lacking}: an entry has both or neither")
    if bug.layer is not None and bug.layer not in bug.requires:
        message = f"layer: {bug.layer!r} has no versions in requires, which has {', '.join(bug.requires) or 'none'}"
        yield Mistake(line_of("layer"), message)
    if bug.upstream.fixed_in is not None:
        try:
            Version(bug.upstream.fixed_in)
        except InvalidVersion:
            line = line_of("upstream", "fixed_in")
            yield Mistake(line, f"fixed_in: {bug.upstream.fixed_in!r} is not a version")
    for index, hit in enumerate(bug.hits):
        yield from _check_hit(hit, functools.partial(line_of, "hits", index))


def _check_option(name: str, option: Option, line_of: Callable[..., int]) -> Iterator[Mistake]:
    # Options and choices are written in environment variables and in the names of pickled functions.
    for word in (name, *option.choices):
        if not CHOICE.match(word):
            yield Mistake(line_of("choices", word), f"{word!r} is not lower-case words joined by '-' or '_'")
    if len(option.choices) < 2:
        yield Mistake(
            line_of("choices"), f"the option {name!r} has {len(option.choices)} choices, expected two or more"
        )
    if option.default not in option.choices:
        message = f"default {option.default!r} is not one of the choices{suggestion(option.default, option.choices)}"
        yield Mistake(line_of("default"), message)


def _check_target(target: Target, index: int, line_of: Callable[..., int]) -> Iterator[Mistake]:
    if not MODULE.match(target.module):
        message = f"target {target.module!r} is outside 'trl.'; only modules of TRL are patched"
        yield Mistake(line_of("targets", index, "module"), message)
    if not ATTRIBUTE.match(target.attribute):
        message = f"attribute {target.attribute!r} is not a function or a Class.method"
        yield Mistake(line_of("targets", index, "attribute"), message)
    if target.trl is not None:
        yield from check_range(target.trl, "trl", line_of("targets", index, "trl"))


def _check_hit(hit: Hit, line_of: Callable[..., int]) -> Iterator[Mistake]:
    if not hit.trainers:
        yield Mistake(line_of("trainers"), "trainers is empty: expected names such as [DPO, KTO], or ['*'] for any")
    for index, trainer in enumerate(hit.trainers):
        if trainer != "*" and (not TRAINER.match(trainer) or trainer.endswith("Trainer")):
            message = f"trainer {trainer!r} is not a name such as DPO, without Trainer, nor '*' for any"
            yield Mistake(line_of("trainers", index), message)
    for role, text in (("symptom", hit.symptom), ("depends", hit.depends)):
        if text is not None and not text.strip():
            yield Mistake(line_of(role), f"{role} is empty")
    for name, condition in hit.when.items():
        line = line_of("when", name)
        if not conditions.NAME.match(name):
            yield Mistake(line, f"when: {name!r} is not the name of an argument, such as packing or model.adapter_name")
        error = conditions.validation_error(condition)
        if error is not None:
            yield Mistake(line, f"when: {name}: {error}")
    yield from _check_facts(hit, line_of)
    if hit.trl is not None:
        yield from check_range(hit.trl, "trl", line_of("trl"))


def _check_facts(hit: Hit, line_of: Callable[..., int]) -> Iterator[Mistake]:
    if hit.facts and hit.depends is None:
        yield Mistake(line_of("facts"), "facts without depends: it says in words what the facts say")
    for name, condition in hit.facts.items():
        line = line_of("facts", name)
        if name not in FACTS:
            yield Mistake(line, f"facts: {name!r} is no fact{suggestion(name, FACTS)}; of {', '.join(FACTS)}")
        error = conditions.validation_error(condition)
        if error is not None:
            yield Mistake(line, f"facts: {name}: {error}")


def check_range(specifiers: str, name: str, line: int) -> Iterator[Mistake]:
    """Yield a mistake if ``specifiers`` are no range of versions."""
    try:
        SpecifierSet(specifiers)
    except InvalidSpecifier:
        yield Mistake(line, f"{name}: {specifiers!r} is not a PEP 440 range such as '>=0.11.0,<0.12.0'")


def _check_review(patch: Bug, line_of: Callable[..., int]) -> Iterator[Mistake]:
    """Require ``review_by`` for a range without an end, which claims releases that nobody has tested yet."""
    try:
        open_ended = SpecifierSet(patch.trl).contains("999999")
    except InvalidSpecifier:
        return
    if open_ended and patch.review_by is None:
        remedy = 'review_by: "2027-05-21", say, is the day by which to look whether newer releases still have the bug'
        yield Mistake(line_of("trl"), f"trl: {patch.trl!r} has no end and the patch no review_by; {remedy}")
    if not open_ended and patch.review_by is not None:
        yield Mistake(line_of("review_by"), f"review_by: the range {patch.trl!r} has an end, so it needs no review")
