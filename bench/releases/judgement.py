"""The judgement on a patch in a new release: what its self-tests, its proofs and the bodies of its targets say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trl_hotfix.matching import gates
from trl_hotfix.model import Patch

from bench.releases import yaml_edits

Answer = Mapping[str, Any]


class State(str, Enum):
    """The state of a bug in a new release. Those of ``FOR_A_PERSON`` are not decided by the bench."""

    OPEN = "open"
    FIXED = "fixed"
    PARTLY_FIXED = "partly fixed"
    ABSENT = "absent"
    BACK = "back"
    UNCLEAR = "unclear"


FOR_A_PERSON = (State.BACK, State.UNCLEAR)
EDITED = (State.FIXED, State.PARTLY_FIXED)


class BodyChange(str, Enum):
    """How the body of a target differs from that in the release before. A target may be in neither."""

    EQUAL = "equal"
    CHANGED = "changed"
    GONE = "gone"
    NEW = "new"
    NEITHER = "in neither"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The state of a bug in a new release. ``fixed_modules``: where the release has fixed it."""

    patch: Patch
    state: State
    bodies: Mapping[str, BodyChange]
    why: str = ""
    fixed_modules: frozenset[str] = frozenset()


def body_change(before: str | None, now: str | None) -> BodyChange:
    if before == now:
        return BodyChange.EQUAL if now is not None else BodyChange.NEITHER
    if now is None:
        return BodyChange.GONE
    return BodyChange.NEW if before is None else BodyChange.CHANGED


def judge(
    patch: Patch, release: str, bodies: Mapping[str, BodyChange], cells: Sequence[Answer], proofs: Sequence[Answer]
) -> Judgement:
    """Return the judgement on ``patch`` by its cells and proofs in the new release, which were run as declared."""
    reasons = list(_reasons(patch, release, bodies, cells, proofs))
    if reasons:
        return Judgement(patch, State.UNCLEAR, bodies, "; ".join(reasons))
    back = [answer for answer in [*cells, *proofs] if answer["verdict"] == "uncovered"]
    if back:
        return Judgement(patch, State.BACK, bodies, "out of range, but the bug is there")
    in_range = gates.targets_for(patch, release)
    reds = {module: _reds(module, cells) for module in dict.fromkeys(target.module for target in in_range)}
    fixed_modules = frozenset(module for module, verdicts in reds.items() if verdicts == {"fixed"})
    if fixed_modules:
        state = State.FIXED if len(fixed_modules) == len(reds) else State.PARTLY_FIXED
        return Judgement(patch, state, bodies, "", fixed_modules)
    state = State.OPEN if any(cell["verdict"] == "proven" for cell in cells) else State.ABSENT
    return Judgement(patch, state, bodies)


def _reasons(
    patch: Patch, release: str, bodies: Mapping[str, BodyChange], cells: Sequence[Answer], proofs: Sequence[Answer]
) -> Iterator[str]:
    """Give the reasons why a person has to look before anything is decided."""
    for kind, answers in (("self-test", cells), ("proof", proofs)):
        for answer in answers:
            if answer["verdict"] in ("error", "unrepaired"):
                yield f"{kind} on {answer['stack']}: {answer['verdict']}: {answer['why'] or 'see its log'}"
    in_range = gates.targets_for(patch, release)
    for target in in_range:
        if bodies[target.name] is BodyChange.GONE:
            yield f"{target.name} is gone: has its code, with the bug, moved?"
    fixed = [target for target in in_range if _reds(target.module, cells) == {"fixed"}]
    for module in dict.fromkeys(target.module for target in in_range):
        verdicts = _reds(module, cells)
        if len(verdicts) > 1:
            yield f"{module}: the self-test says {' and '.join(sorted(verdicts))}, depending on the stack"
        elif verdicts == {"absent"}:
            yield f"{module}: the self-test says absent: the bug cannot occur as it did; can it elsewhere?"
    for module in dict.fromkeys(target.module for target in fixed):
        targets = [target for target in fixed if target.module == module]
        if all(bodies[target.name] is BodyChange.EQUAL for target in targets):
            yield f"{module}: fixed, but no target has changed: a body does not tell whether it has the bug"
        if not all(yaml_edits.is_open(patch.range_of(target)) for target in targets):
            yield f"{module}: fixed, but the declared range goes on to a later release"
    verdicts_of_proofs = {proof["verdict"] for proof in proofs} - {"absent"}
    everything_fixed = bool(fixed) and len(fixed) == len(in_range)
    if everything_fixed and verdicts_of_proofs - {"not-reproduced"}:
        yield "the self-test says fixed, but training still has the bug"
    if in_range and not fixed and "not-reproduced" in verdicts_of_proofs:
        yield "the self-test reproduces the bug, but training does not"


def _reds(module: str, cells: Sequence[Answer]) -> set[str]:
    """Return what the unpatched self-test says of a module, on the stacks where the patch applies."""
    return {
        str(cell["leaves"][module]["red"]["verdict"])
        for cell in cells
        if cell["verdict"] != "absent" and "red" in cell["leaves"].get(module, {})
    }
