"""The kinds of claims: what must agree, of one run or of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from .compare import Difference, differences, numbers, shares, unexpected
from .run import Run
from .setting import Setting

TRAINED = frozenset({"gradients", "weights"})
ALL = TRAINED | {"logs"}
EVALUATED = frozenset({"evaluations"})
EFFECTS = frozenset({"effects"})
SEEDED = ALL | {"random"}

COUNTED = frozenset({"num_tokens", "eval_num_tokens"})
"""What is counted on from step to step."""

RunOf = Callable[[Setting], Run]


class Claim(Protocol):
    """What must hold of the runs in some settings. Its text is its name."""

    @property
    def settings(self) -> tuple[Setting, ...]: ...

    def violations(self, run_of: RunOf) -> Iterator[Difference]: ...


@dataclass(frozen=True)
class Pair:
    """Two settings whose runs must agree, and in what. ``part`` is the set that ``right`` evaluates beside others."""

    left: Setting
    right: Setting
    of: frozenset[str] = ALL
    part: str = ""

    def __str__(self) -> str:
        evaluations = ": evaluations" if self.of == EVALUATED else ""
        return f"{self.left} = {self.right}{evaluations}"

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self.left, self.right

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        return differences(run_of(self.left), run_of(self.right).of_set(self.part), self.of)


@dataclass(frozen=True)
class Values:
    """A setting in which the first step must log these numbers."""

    setting: Setting
    numbers: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.setting}: {', '.join(f'{name} {value:.4g}' for name, value in self.numbers.items())}"

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (self.setting,)

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        return unexpected(run_of(self.setting), self.numbers)


@dataclass(frozen=True)
class Standstill:
    """A setting in which nothing moves: the first evaluation is the training step before it, or the next evaluation."""

    setting: Setting
    twice: bool = False

    def __str__(self) -> str:
        return f"{self.setting}: {'evaluation = next evaluation' if self.twice else 'training = evaluation'}"

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (self.setting,)

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        run = run_of(self.setting)
        first, second = (_without(COUNTED, logs) for logs in run.evaluations[:2])
        if self.twice:
            return numbers("evaluation: ", [first], [second], 1)
        # An optimizer has no part in an evaluation.
        trained = {name: value for name, value in _without(COUNTED, run.logs[0]).items() if name in first}
        return numbers("training and evaluation: ", [trained], [{name: first[name] for name in trained}], 1)


def _without(names: frozenset[str], logs: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a training or an evaluation, by the names that both have."""
    return {name.removeprefix("eval_"): value for name, value in logs.items() if name not in names}


@dataclass(frozen=True)
class Moves:
    """A setting in which every weight that has a gradient must move."""

    setting: Setting

    def __str__(self) -> str:
        return f"{self.setting}: weights move"

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (self.setting,)

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        return shares(run_of(self.setting))
