"""Compare the answers of a release with those of the release before: what is new, gone, failed, or no longer asked.

A claim is new if the release before does not violate it. In a claim that it violates too, another difference is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trl_hotfix.relations import ledger
from trl_hotfix.relations.cells import ERROR, HOLDS, UNASKED, VIOLATED
from trl_hotfix.relations.ledger import Finding

from bench.relations.ledger import not_seen
from bench.releases.layout import Place

Answer = Mapping[str, Any]
Name = tuple[str, str, str]
"""A trainer, a relation and a setting."""
NOT_THERE = "not there"
"""The state of a claim about an option, or of a trainer, that a release lacks."""


class New(NamedTuple):
    """What a claim violates, or the error of its run, that the release before does not have.

    ``was`` is the state of the claim there. ``cause`` is that of the ledger, or None.
    """

    name: Name
    was: str
    what: str
    numbers: tuple[float | None, float | None] | None
    cause: str | None


class Changed(NamedTuple):
    """A claim that the release before has answered otherwise. ``why`` has the reason, if there is one."""

    name: Name
    was: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """What the relations say of a release, and did not say of the one before. ``ended`` are findings not seen now."""

    before: Place
    place: Place
    answers: Sequence[Answer]
    violations: tuple[New, ...]
    errors: tuple[New, ...]
    gone: tuple[Changed, ...]
    unasked: tuple[Changed, ...]
    ended: tuple[Finding, ...]

    @property
    def for_a_person(self) -> Iterator[str]:
        """Give what a person has to look at: violations and errors without a cause, and ranges to end."""
        for what, news in (("is violated", self.violations), ("has an error", self.errors)):
            for (trainer, relation), claims in _by_relation(one for one in news if one.cause is None).items():
                yield f"relations: {relation} of {trainer} {what}, without a cause in the ledger: {claims}"
        for finding in self.ended:
            yield (
                f"relations: {finding.relation} of {', '.join(finding.trainers)}, {finding.cause}: it is not seen in "
                f"{self.place.release}; end its range"
            )

    def __str__(self) -> str:
        new = {name for name, *_ in self.violations}
        alone = {name for name, *_, cause in self.violations if cause is None}
        return (
            f"{len(new)} claims newly violated, {len(alone)} of them without a cause; {len(self.errors)} new errors, "
            f"{len(self.gone)} gone, {len(self.unasked)} no longer asked"
        )


def compared(answers: Sequence[Answer], before: Place, place: Place, findings: Sequence[Finding]) -> Comparison:
    """Return the comparison of two places, whose answers are all with the patches."""
    old, new = ({_name(one): one["cell"] for one in answers if one["place"] == str(each)} for each in (before, place))
    news = [one for name, cell in new.items() for one in _news(name, old.get(name), cell, place, findings)]
    return Comparison(
        before,
        place,
        answers,
        violations=tuple(one for one in news if new[one.name]["state"] == VIOLATED),
        errors=tuple(one for one in news if new[one.name]["state"] == ERROR),
        gone=tuple(_changed(old, new, {VIOLATED, ERROR}, {HOLDS})),
        unasked=tuple(_changed(old, new, {HOLDS, VIOLATED, ERROR}, {UNASKED, NOT_THERE})),
        ended=tuple(_ended(answers, before, place, findings)),
    )


def _name(answer: Answer) -> Name:
    cell = answer["cell"]
    return cell["trainer"], cell["relation"], cell["setting"]


def _state(cell: Mapping[str, Any] | None) -> str:
    return NOT_THERE if cell is None else cell["state"]


def _news(
    name: Name, before: Mapping[str, Any] | None, cell: Mapping[str, Any], place: Place, findings: Sequence[Finding]
) -> Iterator[New]:
    here = ledger.here(findings, place.version_of, on=True)
    known = {kind_of(each["what"]) for each in before["differences"]} if before else set()
    for each in cell["differences"]:
        if kind_of(each["what"]) not in known:
            cause = ledger.cause_of(cell, each["what"], here)
            numbers = each["left"], each["right"]
            yield New(name, _state(before), each["what"], numbers, cause.cause if cause else None)
    if cell["state"] == ERROR and _state(before) != ERROR:
        cause = ledger.cause_of(cell, cell["why"], here)
        yield New(name, _state(before), cell["why"], None, cause.cause if cause else None)


def kind_of(what: str) -> str:
    """Return what differs without the step: another step of the same number is no other difference."""
    return re.sub(r" of step \d+", "", what)


def _changed(old: Mapping[Name, Any], new: Mapping[Name, Any], was: set[str], became: set[str]) -> Iterator[Changed]:
    for name, cell in old.items():
        now = new.get(name)
        if cell["state"] in was and _state(now) in became:
            yield Changed(name, cell["state"], now["why"] if now else "the release has no such option")


def _ended(answers: Sequence[Answer], before: Place, place: Place, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Give the findings that the release has not and the one before had."""
    old, new = (
        [finding for _, finding in not_seen([one for one in answers if one["place"] == str(each)], findings)]
        for each in (before, place)
    )
    yield from (finding for finding in new if finding not in old)


def _by_relation(news: Any) -> dict[tuple[str, str], str]:
    """Return the number of claims of each trainer and relation, as a text."""
    claims: dict[tuple[str, str], set[str]] = {}
    for one in news:
        trainer, relation, setting = one.name
        claims.setdefault((trainer, relation), set()).add(setting)
    return {name: f"{len(each)} claim{'s' * (len(each) > 1)}" for name, each in claims.items()}
