"""The report on a new release, in Markdown, for its pull request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from trl_hotfix.matching.sources import Release

from bench.relations import compared_report
from bench.relations.compared import Comparison
from bench.releases.judgement import FOR_A_PERSON, BodyChange, Judgement, State

LINES = 60
"""The length of the diff of one function."""
ORDER = (State.UNCLEAR, State.BACK, State.FIXED, State.PARTLY_FIXED, State.OPEN, State.ABSENT)


class Step(NamedTuple):
    """A step of the command: what it did, and how long that took."""

    name: str
    result: str
    seconds: float


@dataclass
class Findings:
    """What the command has seen and done. ``edits``: the unified diff of the files that it has edited."""

    release: str
    before: str
    stacks: Sequence[str]
    judgements: Sequence[Judgement]
    verdicts: Mapping[str, str]
    edits: str = ""
    relations: Comparison | None = None
    to_do: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def for_a_person(self) -> list[str]:
        """Return what a person has to look at before the release is on record as it should be."""
        unclear = [judgement for judgement in self.judgements if judgement.state in FOR_A_PERSON]
        return [
            *(f"`{judgement.patch.id}`: {judgement.state.value}: {judgement.why}" for judgement in unclear),
            *self.to_do,
            *(self.relations.for_a_person if self.relations is not None else ()),
        ]


def counts(judgements: Iterable[Judgement]) -> str:
    states = [judgement.state for judgement in judgements]
    return ", ".join(f"{states.count(state)} {state.value}" for state in ORDER if state in states)


def markdown(findings: Findings, old: Release, new: Release) -> str:
    """Return the report. ``old`` and ``new`` are the sources of the release before and of the new one."""
    sections = [
        (f"TRL {findings.release}", _summary(findings)),
        ("For a person", [f"- {line}" for line in findings.for_a_person] or ["Nothing."]),
        ("Bugs", list(_table(findings))),
        ("Edits", ["```diff", findings.edits.rstrip(), "```"] if findings.edits else ["None."]),
        ("Relations", list(compared_report.markdown(findings.relations)) if findings.relations else ["Not asked."]),
        ("Changed bodies of open and fixed bugs", list(_diffs(findings.judgements, old, new)) or ["None."]),
        ("Time", list(_times(findings.steps))),
    ]
    texts = [
        f"{'#' if index == 0 else '##'} {title}\n\n" + "\n".join(lines) for index, (title, lines) in enumerate(sections)
    ]
    return "\n\n".join(texts) + "\n"


def _summary(findings: Findings) -> list[str]:
    stacks = ", ".join(findings.stacks)
    return [
        f"Compared with {findings.before}, on {stacks}.",
        f"{len(findings.judgements)} patches: {counts(findings.judgements)}.",
        "",
        "`open`: the bug is there, and the patch repairs it. `fixed`: the range now ends before this release.",
        "`absent`: it ended before, and the bug is not back. `back`: it ended before, and the bug is there again.",
        "`unclear`: a person decides.",
    ]


def _table(findings: Findings) -> Iterator[str]:
    shown = [judgement for judgement in findings.judgements if judgement.state is not State.ABSENT]
    yield from ("| patch | state | bodies of its targets | self-tests and proofs |", "|---|---|---|---|")
    for judgement in sorted(shown, key=lambda judgement: ORDER.index(judgement.state)):
        verdicts = findings.verdicts.get(judgement.patch.id, "")
        yield f"| `{judgement.patch.id}` | {judgement.state.value} | {_bodies(judgement)} | {verdicts} |"
    absent = [judgement for judgement in findings.judgements if judgement.state is State.ABSENT]
    if absent:
        changed = [f"`{judgement.patch.id}`" for judgement in absent if BodyChange.CHANGED in judgement.bodies.values()]
        gone = [f"`{judgement.patch.id}`" for judgement in absent if BodyChange.GONE in judgement.bodies.values()]
        yield ""
        yield f"{len(absent)} patches end before {findings.release}, and their bugs are not back."
        for change, ids in (("Changed body, same verdict", changed), ("Target gone", gone)):
            if ids:
                yield f"{change}: {', '.join(ids)}."


def _bodies(judgement: Judgement) -> str:
    present = {name: change for name, change in judgement.bodies.items() if change is not BodyChange.NEITHER}
    if set(present.values()) == {BodyChange.EQUAL}:
        return "equal"
    return "<br>".join(f"`{name.removeprefix('trl.')}` {change.value}" for name, change in present.items())


def _diffs(judgements: Iterable[Judgement], old: Release, new: Release) -> Iterator[str]:
    changed: dict[str, list[str]] = {}
    for judgement in judgements:
        if judgement.state is not State.ABSENT:
            for name, change in judgement.bodies.items():
                if change is BodyChange.CHANGED:
                    changed.setdefault(name, []).append(judgement.patch.id)
    for name, ids in changed.items():
        yield from (f"<details><summary>{name} ({', '.join(ids)})</summary>", "", "```diff")
        module, _, attribute = name.partition(":")
        before, after = (release.text(module, attribute) or "" for release in (old, new))
        yield from diff(before, after, old.version, new.version)
        yield from ("```", "", "</details>", "")


def diff(before: str, after: str, old: str, new: str, limit: int | None = LINES) -> list[str]:
    """Return a unified diff of two texts. What is behind ``limit`` lines is counted."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm=""))
    shown = list(islice(lines, limit))
    return shown if len(shown) == len(lines) else [*shown, f"... {len(lines) - len(shown)} more lines"]


def _times(steps: Sequence[Step]) -> Iterator[str]:
    yield from ("| step | result | seconds |", "|---|---|---:|")
    yield from (f"| {step.name} | {step.result} | {step.seconds:.0f} |" for step in steps)
    yield f"| all | | {sum(step.seconds for step in steps):.0f} |"
