"""Make the page of what the relations found: by release, trainer and relation what holds, and whose the rest is.

It is made of ``evidence/relations`` and of the ledger, with all patches on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from packaging.version import Version

from trl_hotfix.model import Patch
from trl_hotfix.relations.cells import ERROR, HOLDS, UNASKED, VIOLATED
from trl_hotfix.relations.ledger import Finding
from trl_hotfix.relations.relations import RELATIONS

from bench.relations import control
from bench.relations.ledger import explained
from tools.pages import bug_pages
from tools.pages.markdown import escaped, prose

PATH = "relations-results.md"
ASKED = (HOLDS, VIOLATED, ERROR)
OPEN = "no cause yet"

Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Violation:
    """A claim that does not hold: what differs most, what else does, and the cause of each, or None."""

    trainer: str
    relation: str
    setting: str
    largest: Mapping[str, Any]
    others: tuple[str, ...]
    causes: tuple[Finding | None, ...]

    @property
    def whose(self) -> str:
        return "<br>".join(dict.fromkeys(map(whose, self.causes)))

    @property
    def is_open(self) -> bool:
        return any(cause is None for cause in self.causes)

    @property
    def by_how_much(self) -> str:
        """Return what differs most, with its numbers, as Markdown."""
        what: str = self.largest["what"]
        left, right, apart = (self.largest.get(name) for name in ("left", "right", "apart"))
        if (left, right) == (None, None) or " became " in what:
            return escaped(what)
        share = "" if apart is None or None in (left, right) else f" ({100 * apart:.3g}\u00a0%)"
        return f"{escaped(what)}: {_number(left)} and {_number(right)}{share}"


@dataclass(frozen=True)
class Cause:
    """Whose some violations are, why they are so, and how many there are of each trainer."""

    whose: str
    why: str
    claims: str
    number: int


class Counted(NamedTuple):
    """A cell of the table of a release: its class, for the colour, and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Release:
    """The answers of a release, with the patches."""

    name: str
    answers: Sequence[Answer]
    violations: Sequence[Violation]

    @property
    def trainers(self) -> list[str]:
        return sorted({one["cell"]["trainer"] for one in self.answers if one["cell"]["state"] in ASKED})

    @property
    def grid(self) -> dict[str, list[Counted]]:
        """Return for each relation what is counted of each trainer."""
        states: dict[tuple[str, str], Counter[str]] = {}
        for cell in (one["cell"] for one in self.answers):
            states.setdefault((cell["relation"], cell["trainer"]), Counter())[cell["state"]] += 1
        return {
            relation: [_counted(states.get((relation, trainer), Counter())) for trainer in self.trainers]
            for relation in RELATIONS
        }

    @property
    def numbers(self) -> tuple[int, int]:
        """Return how many claims hold, and how many were asked."""
        states = Counter(one["cell"]["state"] for one in self.answers)
        return states[HOLDS], sum(states[state] for state in ASKED)

    @property
    def causes(self) -> list[Cause]:
        """Return the causes, that of the most claims first."""
        claims: dict[str, list[Violation]] = {}
        reasons: dict[str, dict[str, None]] = {}
        for violation in self.violations:
            for cause in violation.causes:
                reasons.setdefault(whose(cause), {})[prose(cause.why) if cause else ""] = None
            for name in dict.fromkeys(map(whose, violation.causes)):
                claims.setdefault(name, []).append(violation)
        found = [Cause(name, " ".join(reasons[name]), _by_trainer(each), len(each)) for name, each in claims.items()]
        return sorted(found, key=lambda cause: -cause.number)


def _number(number: float | None) -> str:
    return "none" if number is None else f"{number:.4g}"


def _counted(states: Counter[str]) -> Counted:
    asked = sum(states[state] for state in ASKED)
    if not asked:
        return Counted("unasked", "not asked")
    if states[HOLDS] == asked:
        return Counted("hold", f"{asked} hold")
    return Counted("some", f"{states[HOLDS]} of {asked}")


def _by_trainer(violations: Sequence[Violation]) -> str:
    counts = Counter(violation.trainer for violation in violations)
    return ", ".join(f"{trainer}\u00a0{count}" for trainer, count in counts.items())


def _violations(answers: Sequence[Answer], findings: Sequence[Finding]) -> Iterator[Violation]:
    """Give the claims that do not hold, in the order of the relations."""
    for relation in RELATIONS:
        for answer in answers:
            found = list(explained(answer, findings)) if answer["cell"]["relation"] == relation else []
            if found:
                (largest, _), *others = found
                names = tuple(each["what"] for each, _ in others)
                causes = tuple(cause for _, cause in found)
                yield Violation(answer["cell"]["trainer"], relation, answer["cell"]["setting"], largest, names, causes)


def whose(cause: Finding | None) -> str:
    """Return whose a difference is, as Markdown."""
    if cause is None:
        return f"**{OPEN}**"
    if cause.meant:
        return f"TRL means it: `{cause.meant}`"
    if cause.new:
        return f"new bug: `{cause.new}`"
    bug = cause.patch or cause.known
    return f"{'patch' if cause.patch else 'known bug'}: [`{bug}`](bugs/{bug}.md)"


def releases(answers: Sequence[Answer], findings: Sequence[Finding]) -> list[Release]:
    """Return the releases that have answers with the patches, the newest first."""
    by_name: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer["on"]:
            by_name.setdefault(answer["place"].partition("@")[0], []).append(answer)
    return [
        Release(name, by_name[name], tuple(_violations(by_name[name], findings)))
        for name in sorted(by_name, key=Version, reverse=True)
    ]


def unasked(of_releases: Sequence[Release]) -> Iterator[tuple[str, str, str]]:
    """Give each reason why claims cannot be asked, with the trainers and the releases."""
    places: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for release in of_releases:
        for cell in (one["cell"] for one in release.answers):
            if cell["state"] == UNASKED:
                # The sentences that follow name what the release has instead.
                trainers, names = places.setdefault(cell["why"].partition(". ")[0], ({}, {}))
                trainers[cell["trainer"]] = names[release.name] = None
    for why, (trainers, names) in sorted(places.items()):
        yield why, ", ".join(sorted(trainers)), ", ".join(names)


def page(answers: Sequence[Answer], findings: Sequence[Finding], patches: Sequence[Patch] = ()) -> str:
    """Return the page of these answers, and of the bugs of these patches that the relations find."""
    found = releases(answers, findings)
    bugs = control.bugs(patches, findings)
    return bug_pages.rendered(
        "relations.md", relations=RELATIONS, releases=found, unasked=list(unasked(found)), bugs=bugs
    )
