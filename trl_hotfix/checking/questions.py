"""The relations that a check asks of a user's run, and when it cannot ask one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .forks import Outcome
from .shapes import Shape
from .variant import CannotBeAskedError, Variant

WHY = {
    "accumulation": "A step is over the same rows, however many are computed at a time.",
    "padding": "Padding is no part of a text. How much there is says nothing.",
    "order": "A loss is a sum over the rows of a batch, and a sum has no order.",
    "generation": "The first step is over the same rows, however many steps a generation serves.",
    "evaluation": "To look at a model does not change it.",
}


@dataclass(frozen=True)
class Question:
    """Does the run of ``variant`` agree with the run of ``base``? ``refused``: why the check cannot ask."""

    relation: str
    base: Variant
    variant: Variant
    refused: str = ""


def questions(plain: Variant, facts: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[Question]:
    """Give the questions of a run by what it is."""
    shape: Shape = facts["shape"]
    others = shape.others()
    few = ""
    if facts["rows"] is not None and facts["rows"] * (shape.group if facts["generates"] else 1) < shape.rows:
        few = f"its trainer has made {facts['rows']} rows of those taken, and a step has {shape.rows}"
    for batch_size, times in others:
        yield Question("accumulation", plain, plain.but(batch_size=batch_size, accumulation=times), few)
    if not others:
        yield Question("accumulation", plain, plain, "a batch must have whole groups, and has no parts")
    if facts["generates"] and facts["widens"]:
        yield Question("padding", plain, plain.but(width=16))
    else:
        yield Question("padding", plain, plain.but(wider=True), _no_padding(facts))
    yield Question("order", plain, plain.but(reversed=True), _no_order(facts, notes))
    if facts["generation"]:
        # A loss by the tokens of a generation has those of several steps.
        alike = plain.but(equal_lengths=True)
        yield Question("generation", alike, alike.but(generation=2))
    no_rows = "" if facts["evaluates"] else "the run has no rows to evaluate"
    yield Question("evaluation", plain, plain.but(evaluates=True), no_rows)


def _no_padding(facts: Mapping[str, Any]) -> str:
    return "its rows are packed, and have no padding" if facts["packs"] else ""


def _no_order(facts: Mapping[str, Any], notes: Mapping[str, Any]) -> str:
    if "sampled" not in notes:
        return "its rows come in an order of their own, as those of a stream do"
    return "one generation serves several steps" if facts["reused"] else ""


def check_asked(question: Question, plain: Outcome, other: Outcome) -> None:
    """Raise ``CannotBeAskedError`` if two runs say nothing about a question."""
    if other.error:
        raise CannotBeAskedError(f"that run fails: {other.error}" + (f" ({other.where})" if other.where else ""))
    if not any(float(value.abs().max()) for step in plain.run.gradients for value in step.values()):
        raise CannotBeAskedError("its gradient is zero, and two runs that learn nothing agree about nothing")
    if "not wider" in other.notes and not other.notes["wider"]:
        raise CannotBeAskedError(str(other.notes["not wider"]))
    is_padded = question.variant.wider or question.variant.width
    if is_padded and "width" in other.notes and other.notes["width"] <= plain.notes["width"]:
        raise CannotBeAskedError("its trainer takes the padding away again")
    if question.variant.evaluates and not other.run.evaluations:
        raise CannotBeAskedError("that run did not evaluate")
