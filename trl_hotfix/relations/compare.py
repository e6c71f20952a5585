"""The differences of two runs, each against the tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .run import Run
from .tolerance import tolerance

HALF_A_DIGIT = 1e-4
"""TRL and transformers round what they log to four digits: up in one run, and perhaps down in the other."""

FEW = 0.1
"""The share of the elements that may end by chance where they were."""

OF_WEIGHTS = frozenset({"grad_norm", "num_tokens"})
"""What is logged of a step that depends on which weights are trained, beside what the model computes."""


@dataclass(frozen=True)
class Difference:
    """What two runs disagree about. ``apart`` is relative to the larger of the two."""

    what: str
    left: float
    right: float
    apart: float


def differences(left: Run, right: Run, of: frozenset[str]) -> Iterator[Difference]:
    """Give where ``right`` is not ``left``, of ``gradients``, ``weights``, ``logs`` and ``evaluations``.

    A run that was resumed is compared from its first step on.
    """
    first = max(left.first_step, right.first_step)
    if "gradients" in of:
        ends = [run.first_step - 1 + len(run.gradients) for run in (left, right)]
        if ends[0] != ends[1]:
            yield Difference("number of steps", ends[0], ends[1], math.inf)
        for step in range(first, first + min(len(left.gradients), len(right.gradients))):
            pair = left.gradients[step - left.first_step], right.gradients[step - right.first_step]
            yield from tensors(f"gradient of step {step}", *pair, may_be_zero=False)
    if "weights" in of:
        yield from tensors("weights at the end", left.weights, right.weights)
    if "logs" in of:
        yield from numbers("", left.logs[first - left.first_step :], right.logs[first - right.first_step :], first)
    if "effects" in of:
        for name, (before, after) in right.effects.items():
            yield Difference(f"{name}: {before} became {after}", 0.0, 1.0, math.inf)
    if "evaluations" in of:
        yield from numbers("evaluation: ", left.evaluations, right.evaluations, 1)
    if "first step" in of:
        one, other = ({name: run.logs[0][name] for name in run.logs[0].keys() - OF_WEIGHTS} for run in (left, right))
        yield from numbers("", [one], [other], 1)
    if "random" in of:
        for name in left.random:
            if left.random[name] != right.random[name]:
                yield Difference(f"random state of {name} at the end", 0.0, 1.0, math.inf)


def tensors(
    what: str, left: Mapping[str, Any], right: Mapping[str, Any], *, may_be_zero: bool = True
) -> Iterator[Difference]:
    """Give the largest difference, relative to the largest element of all tensors.

    Two runs that learn nothing agree about nothing: a gradient may not be zero in both.
    """
    if left.keys() != right.keys():
        yield Difference(f"{what}: tensors", len(left), len(right), math.inf)
        return
    if not left:
        return
    distances = {name: float((left[name] - right[name]).abs().max()) for name in left}
    # No number is greater than one that is not a number, wherever that stands.
    worst = max(left, key=lambda name: math.inf if math.isnan(distances[name]) else distances[name])
    scale = max(float(value.abs().max()) for side in (left, right) for value in side.values())
    if not (scale or may_be_zero):
        yield Difference(f"{what}: zero in both", 0.0, 0.0, 0.0)
    apart = distances[worst] / scale if scale else 0.0
    if not apart <= tolerance(left[worst].dtype):
        norms = [math.sqrt(sum(float((value**2).sum()) for value in side.values())) for side in (left, right)]
        yield Difference(f"{what}: norm", norms[0], norms[1], apart)


def numbers(
    what: str, left: Sequence[Mapping[str, float]], right: Sequence[Mapping[str, float]], first: int
) -> Iterator[Difference]:
    """Give the first step at which each number differs, of the logs from step ``first`` on."""
    import torch

    allowed = tolerance(torch.float32)
    if len(left) != len(right):
        yield Difference(f"{what}number of logs", len(left), len(right), math.inf)
    for name in sorted({name for logs in [*left, *right] for name in logs}):
        both = [(one.get(name), other.get(name)) for one, other in zip(left, right, strict=False)]
        for step, (one, other) in enumerate(both, first):
            difference = _number(f"{what}{name} of step {step}", one, other, allowed)
            if difference is not None:
                yield difference
                break


def means(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the logs that have it."""
    by_name: dict[str, list[float]] = {}
    for log in logs:
        for name, value in log.items():
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _number(what: str, left: float | None, right: float | None, allowed: float) -> Difference | None:
    if left is None or right is None:
        one, other = (math.nan if number is None else number for number in (left, right))
        return None if left is right else Difference(what, one, other, 1.0)
    if math.isnan(left) and math.isnan(right):
        return None
    distance, scale = abs(left - right), max(abs(left), abs(right))
    if distance <= max(allowed * scale, HALF_A_DIGIT):
        return None
    return Difference(what, left, right, distance / scale)


def unexpected(run: Run, numbers: Mapping[str, float]) -> Iterator[Difference]:
    """Give which of these numbers the first step logs otherwise, or not at all."""
    logged = run.logs[0]
    for name, expected in numbers.items():
        found = logged.get(name, math.nan)
        if not abs(found - expected) <= HALF_A_DIGIT:
            yield Difference(f"{name} of step 1", expected, found, abs(found - expected))


def shares(run: Run) -> Iterator[Difference]:
    """Give the weights that have elements with a gradient which did not move, and the share of those that did."""
    for name, start in run.start.items():
        has_gradient = sum(step[name].abs() for step in run.gradients if name in step) != 0
        moved = (run.weights[name] != start) & has_gradient
        share = float(moved.sum()) / max(int(has_gradient.sum()), 1)
        if share < 1 - FEW:
            yield Difference(f"share of {name} that moves", 1.0, share, 1 - share)
