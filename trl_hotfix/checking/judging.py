"""Compares runs, and finds whose a difference is and where it begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..matching.versions import installed
from ..relations import ledger
from ..relations.compare import Difference
from ..relations.run import Run
from .answers import HOLDS, NOT_ASKED, VIOLATED, Relation
from .blame import METRICS, TRAINING, Blame, Parts
from .comparing import differences
from .forks import Outcome, Runs
from .questions import WHY, Question, check_asked
from .variant import CannotBeAskedError, Variant

ALONG = 0.98
"""The least cosine of two gradients for which it makes sense to say how many times larger one is."""


class Judge:
    """Answers questions about the runs of a script. ``plain`` is the run as it is."""

    def __init__(self, runs: Runs, plain: Variant, facts: Mapping[str, Any]) -> None:
        self._runs, self._plain, self._facts = runs, plain, facts
        self._blame = Blame(runs, facts)

    def is_settled(self, drawn: Outcome) -> bool:
        """Return whether the run is the same with other random numbers."""
        plain = self._runs.of(self._plain)
        return not differences(plain, drawn, self._plain, TRAINING)

    def draws(self, drawn: Variant) -> str:
        """Return what of the user's code makes a run depend on random numbers, or nothing."""
        found = differences(self._runs.of(self._plain), self._runs.of(drawn), drawn, TRAINING)
        mine = self._blame.of_the_user(self._plain, drawn, found, TRAINING)
        return self._blame.part(self._plain, drawn, mine, TRAINING) if mine else ""

    def answer(self, question: Question) -> list[Relation]:
        """Return what we know of a relation, in training and in metrics."""
        base = _empty(question)
        if question.refused:
            return [{**base, "state": NOT_ASKED, "reason": question.refused}]
        plain = self._runs.of(question.base)
        other = self._runs.of(question.variant)
        try:
            check_asked(question, plain, other)
        except CannotBeAskedError as error:
            return [{**base, "state": NOT_ASKED, "reason": str(error)}]
        training = differences(plain, other, question.variant, TRAINING)
        if training:
            # What a run logs follows from its training.
            return self._judged(base, question, training, TRAINING)
        metrics = differences(plain, other, question.variant, METRICS)
        return [base, *(self._judged({**base, "part": "metrics"}, question, metrics, METRICS))]

    def _judged(self, base: Relation, question: Question, found: Sequence[Difference], of: Parts) -> list[Relation]:
        """Return what the user's code makes, and what TRL's makes."""
        if not found:
            return [base]
        answers = []
        mine = self._blame.of_the_user(question.base, question.variant, found, of)
        # In training one number follows from the other.
        theirs = [each for each in found if each not in mine] if of is METRICS or not mine else []
        if mine:
            answer = self._violated(base, question, found if of is TRAINING else mine, of)
            self._blame.yours(answer, question.base, question.variant, mine, of)
            answers.append(answer)
        if theirs:
            answer = self._violated(base, question, theirs, of)
            causes = self._causes(question, theirs, of)
            self._blame.of_trl(answer, question.base, question.variant, causes, of)
            answers.append(answer)
        return answers

    def _violated(self, base: Relation, question: Question, found: Sequence[Difference], of: Parts) -> Relation:
        answer: Relation = {**base, "state": VIOLATED, "differences": as_data(found)}
        if of is TRAINING:
            answer["factor"] = factor(self._runs.of(question.base).run, self._runs.of(question.variant).run)
        return answer

    def _causes(self, question: Question, found: Sequence[Difference], of: Parts) -> list[str | None]:
        """Return the cause on record of each difference."""
        # A run with the patch shows whether it is the cause.
        here = [each for each in ledger.here(ledger.load(), installed, on=False) if not each.patch]
        # What TRL means, or logs as a mean of means, is no other in a release that the ledger has not asked.
        others = [each for each in ledger.load() if each.meant or each.new]
        findings = [*here, *others]
        name = str(self._facts["of_trl"]).removesuffix("Trainer")
        cell = {"trainer": name, "relation": question.relation, "setting": self._facts["settings"]}
        causes = []
        for one in found:
            cause = ledger.cause_of(cell, one.what, findings)
            if cause is None and of is METRICS:
                # What one trainer logs as a mean of means, another that has its code does too.
                of_others = [each for each in others if each.new and each.relation == question.relation]
                cause = next((each for each in of_others if one.what.startswith(each.differs)), None)
            causes.append(cause.cause if cause is not None else None)
        return causes


def _empty(question: Question) -> Relation:
    return {
        "relation": question.relation,
        "why": WHY[question.relation],
        "setting": str(question.variant),
        "part": "training",
        "state": HOLDS,
        "reason": "",
        "differences": [],
        "factor": None,
        "cause": None,
        "repaired": False,
        "whose": None,
        "place": None,
    }


def as_data(found: Sequence[Difference]) -> list[Any]:
    return [
        {"what": each.what, "left": _finite(each.left), "right": _finite(each.right), "apart": _finite(each.apart)}
        for each in found
    ]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def factor(plain: Run, other: Run) -> float | None:
    """Return how many times larger one gradient of the first step is, if they go nearly along each other."""
    if not plain.gradients or not other.gradients:
        return None
    left, right = plain.gradients[0], other.gradients[0]
    if left.keys() != right.keys():
        return None
    dot = sum(float((left[name].double() * right[name].double()).sum()) for name in left)
    norms = [math.sqrt(sum(float((value.double() ** 2).sum()) for value in side.values())) for side in (left, right)]
    if not all(norms) or dot / (norms[0] * norms[1]) < ALONG:
        return None
    larger, smaller = max(norms), min(norms)
    return larger / smaller if larger / smaller > 1.01 else None
