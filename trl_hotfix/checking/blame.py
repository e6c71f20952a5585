"""Whose a difference is: the user's class, method, collator or loss, TRL's, or a bug on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..relations import compare
from ..relations.compare import Difference
from .answers import Relation
from .comparing import differences
from .forks import Outcome, Runs
from .places import first_parting
from .variant import ALL, Variant

TRAINING = frozenset({"gradients", "weights"})
METRICS = frozenset({"logs"})

MOST_METHODS = 6
"""Ask at most so many methods of a class one by one."""

Parts = frozenset[str]

_ARGUMENTS = ("data_collator", "compute_loss_func", "callbacks")

YOURS, OF_TRL = "yours", "TRL's"


class Blame:
    """Asks the two runs of a relation again, each time with one thing less that is the user's."""

    def __init__(self, runs: Runs, facts: Mapping[str, Any]) -> None:
        self._runs, self._facts = runs, facts
        # Ask first about what made the difference in the setting before.
        self._patches: dict[Parts, list[str]] = {}
        self._in_part: list[str] = []

    def of_the_user(self, plain: Variant, other: Variant, found: Sequence[Difference], of: Parts) -> list[Difference]:
        """Return the differences that go where all that is the user's own goes."""
        if not self._own():
            return []
        theirs = self._differences(plain, other, of, **self._everything())
        if theirs is None:
            return []
        known = {_name(each) for each in theirs}
        return [each for each in found if _name(each) not in known]

    def yours(self, answer: Relation, plain: Variant, other: Variant, found: Sequence[Difference], of: Parts) -> None:
        """Fill in what of the user's makes these differences."""
        answer["whose"] = YOURS
        answer["place"] = self.part(plain, other, found, of)
        if of is TRAINING:
            answer["reason"] = f"they part at {self._parting(plain, other)}"

    def of_trl(self, answer: Relation, plain: Variant, other: Variant, causes: Sequence[str | None], of: Parts) -> None:
        """Fill in what of TRL's makes the differences of an answer."""
        answer["whose"] = OF_TRL if self._is_trls(plain, other, of) else None
        known = [cause for cause in causes if cause is not None]
        if known and len(known) == len(causes):
            answer["cause"] = ", ".join(dict.fromkeys(known))
            return
        names = {_name(each) for each in answer["differences"]}
        repairing = self._repairing(plain, other, names, of)
        if repairing:
            answer["whose"], answer["repaired"] = OF_TRL, True
            answer["cause"] = "patch " + ", ".join(repairing)
            return
        in_part = self._repairing_in_part(plain, other) if of is TRAINING else []
        if in_part:
            answer["whose"] = OF_TRL
            answer["reason"] = f"{', '.join(in_part)}: repaired with TRL_HOTFIX=1, and a smaller difference is left"
        # All that comes later follows from the first gradient.
        if of is TRAINING and causes[0] is not None:
            answer["cause"] = ", ".join(dict.fromkeys(known))
            return
        if known:
            unknown = [each for each, cause in zip(answer["differences"], causes, strict=True) if cause is None]
            answer["differences"] = unknown
        if of is TRAINING:
            answer["place"] = self._parting(plain, other)

    def _own(self) -> list[str]:
        return [name for name in ("class", *_ARGUMENTS) if self._facts[name]]

    def _everything(self) -> dict[str, Any]:
        own = self._own()
        return {"of_trl": "class" in own, "without": tuple(name for name in own if name != "class")}

    def _is_trls(self, plain: Variant, other: Variant, of: Parts) -> bool:
        """Return whether the runs disagree without anything of the user's, too."""
        return not self._own() or bool(self._differences(plain, other, of, **self._everything()))

    def part(self, plain: Variant, other: Variant, differences: Sequence[Difference], of: Parts) -> str:
        """Return the part of the user's code without which the runs agree."""
        facts, own = self._facts, self._own()
        names = {_name(each) for each in differences}

        def goes(**changes: Any) -> bool:
            found = self._differences(plain, other, of, **changes)
            return found is not None and not names & {_name(each) for each in found}

        if "class" in own and (len(own) == 1 or goes(of_trl=True)):
            methods: Mapping[str, str] = facts["methods"]
            for name in list(methods)[:MOST_METHODS]:
                if len(methods) == 1 or goes(methods=(name,)):
                    return f"{name} ({methods[name]})"
            return f"class {facts['class']}"
        for name in own:
            if name != "class" and (len(own) == 1 or goes(without=(name,))):
                return f"{name}: {facts[name]}"
        return "together: " + ", ".join(f"{name}: {facts[name]}" for name in own)

    def _repairing(self, plain: Variant, other: Variant, names: set[str], of: Parts) -> list[str]:
        """Return the patches with which the runs agree, if there are some."""

        def goes(*patches: str) -> bool:
            found = self._differences(plain, other, of, patches=patches)
            if found is None or names & {_name(each) for each in found}:
                return False
            return of is TRAINING or all(self._shrinks(name, plain, other, patches) for name in names)

        known = self._patches.get(of)
        if known and goes(*known):
            return known
        if not goes(ALL):
            return []
        acted = sorted(set(self._acted(plain)) | set(self._acted(other)))
        if len(acted) > 1:
            acted = [name for name in acted if goes(name)] or acted
        self._patches[of] = acted
        return acted or ["one that trl_hotfix cannot name"]

    def _repairing_in_part(self, plain: Variant, other: Variant) -> list[str]:
        """Return the patches that make the difference of the first gradients much smaller."""
        before = gradients_apart(self._runs.of(plain), self._runs.of(other))

        def shrinks(*patches: str) -> bool:
            left, right = (self._runs.of(variant.but(patches=patches)) for variant in (plain, other))
            return not left.error and not right.error and gradients_apart(left, right) <= before / 5

        if self._in_part and shrinks(*self._in_part):
            return self._in_part
        if not before or not shrinks(ALL):
            return []
        acted = sorted(set(self._acted(plain)) | set(self._acted(other)))
        self._in_part = [name for name in acted if len(acted) == 1 or shrinks(name)] or acted
        return self._in_part

    def _shrinks(self, name: str, plain: Variant, other: Variant, patches: tuple[str, ...]) -> bool:
        """Return whether a logged number is much less apart. Small numbers may agree by rounding."""
        before = _apart(name, self._runs.of(plain), self._runs.of(other))
        after = _apart(name, *(self._runs.of(variant.but(patches=patches)) for variant in (plain, other)))
        return after <= before / 5

    def _acted(self, variant: Variant) -> list[str]:
        found: list[str] = self._runs.of(variant.but(patches=(ALL,))).notes.get("acted", [])
        return found

    def _differences(self, plain: Variant, other: Variant, of: Parts, **changes: Any) -> list[Difference] | None:
        """Return where the changed runs disagree, or None if they say nothing."""
        left, right = (self._runs.of(variant.but(**changes)) for variant in (plain, other))
        if left.error or right.error or not _learns(left):
            return None
        return differences(left, right, other, of)

    def _parting(self, plain: Variant, other: Variant) -> str:
        left, right = (self._runs.of(variant.but(traced=True)) for variant in (plain, other))
        return first_parting(left, right)


def _name(difference: Difference | Mapping[str, Any]) -> str:
    """Return what two runs disagree about, whatever the step."""
    what = difference.what if isinstance(difference, Difference) else str(difference["what"])
    return what.partition(" of step ")[0]


def gradients_apart(left: Outcome, right: Outcome) -> float:
    """Return how far the gradients of the first step are apart, relative to the largest element."""
    found = compare.tensors("", left.run.gradients[0], right.run.gradients[0])
    return max((each.apart for each in found), default=0.0)


def _apart(name: str, left: Outcome, right: Outcome) -> float:
    """Return the largest distance of a logged number, relative to the larger one."""
    pairs = [
        (one[name], other[name])
        for one, other in zip(left.run.logs, right.run.logs, strict=False)
        if name in one and name in other
    ]
    return max((abs(one - other) / (max(abs(one), abs(other)) or 1.0) for one, other in pairs), default=0.0)


def _learns(outcome: Outcome) -> bool:
    return any(float(value.abs().max()) for step in outcome.run.gradients for value in step.values())
