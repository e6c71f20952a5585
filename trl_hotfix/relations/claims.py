"""The kinds of claims: what must agree, of one run or of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from .by_hand import STEP
from .compare import Difference, differences, means, numbers, shares, tensors, unexpected
from .run import Run
from .setting import Setting

TRAINED = frozenset({"gradients", "weights"})
ALL = TRAINED | {"logs"}
EVALUATED = frozenset({"evaluations"})
EFFECTS = frozenset({"effects"})
SEEDED = ALL | {"random"}

COUNTED = frozenset({"num_tokens", "eval_num_tokens"})
"""What is counted on from step to step."""

LAST = frozenset({"grad_norm", "learning_rate", "num_tokens"})
"""What a log has of its last step alone."""

RunOf = Callable[[Setting], Run]


class Claim(Protocol):
    """What must hold of the runs in some settings. Its text is its name."""

    @property
    def settings(self) -> tuple[Setting, ...]: ...

    def violations(self, run_of: RunOf) -> Iterator[Difference]: ...


@dataclass(frozen=True)
class _OfOne:
    setting: Setting

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (self.setting,)


@dataclass(frozen=True)
class _OfTwo:
    left: Setting
    right: Setting

    @property
    def settings(self) -> tuple[Setting, ...]:
        return self.left, self.right


@dataclass(frozen=True)
class Pair(_OfTwo):
    """Two settings whose runs must agree, and in what. ``part`` is the set that ``right`` evaluates beside others."""

    of: frozenset[str] = ALL
    part: str = ""

    def __str__(self) -> str:
        evaluations = ": evaluations" if self.of == EVALUATED else ""
        return f"{self.left} = {self.right}{evaluations}"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        return differences(run_of(self.left), run_of(self.right).of_set(self.part), self.of)


@dataclass(frozen=True)
class Unlike(_OfTwo):
    """Two settings with other rows, which the model must see: the gradients of the first step differ."""

    def __str__(self) -> str:
        return f"{self.left} is not {self.right}"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        left, right = (run_of(setting).gradients[0] for setting in self.settings)
        if not list(tensors("", left, right)):
            yield Difference("gradient of step 1: the same", 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Values(_OfOne):
    """A setting in which the first step must log these numbers."""

    numbers: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.setting}: {', '.join(f'{name} {value:.4g}' for name, value in self.numbers.items())}"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        return unexpected(run_of(self.setting), self.numbers)


@dataclass(frozen=True)
class Standstill(_OfOne):
    """A setting in which nothing moves: the first evaluation is the training step before it, or the next evaluation."""

    twice: bool = False

    def __str__(self) -> str:
        return f"{self.setting}: {'evaluation = next evaluation' if self.twice else 'training = evaluation'}"

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
class Moves(_OfOne):
    """A setting in which every weight that has a gradient must move."""

    def __str__(self) -> str:
        return f"{self.setting}: weights move"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        return shares(run_of(self.setting))


@dataclass(frozen=True)
class Unmoved(_OfTwo):
    """Two settings after which the weights that are not trained are exactly the same."""

    def __str__(self) -> str:
        return f"{self.left} = {self.right}: weights that are not trained"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        left, right = (run_of(setting) for setting in self.settings)
        for name in left.weights.keys() & right.weights.keys() - left.start.keys():
            apart = float((left.weights[name] - right.weights[name]).abs().max())
            if apart:
                yield Difference(f"base weight {name}", 0.0, apart, apart)


@dataclass(frozen=True)
class Averaged(_OfTwo):
    """Two settings: ``right`` logs the means of what ``left`` logs at each step."""

    def __str__(self) -> str:
        return f"means of {self.left} = {self.right}"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        logs, (whole, *_) = (run_of(setting).logs for setting in self.settings)
        expected = {name: value for name, value in means(logs).items() if name not in LAST}
        found = {name: value for name, value in whole.items() if name not in LAST}
        return numbers("means until the end: ", [expected], [found], len(logs))


@dataclass(frozen=True)
class Saved(_OfOne):
    """A setting whose weights, saved and loaded, must be those in memory."""

    def __str__(self) -> str:
        return f"{self.setting}: saved = in memory"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        run = run_of(self.setting)
        # What is not trained may stand elsewhere, as a base and a reference do.
        both = ({name: each for name, each in side.items() if name in run.start} for side in (run.weights, run.saved))
        return tensors("weights in memory and saved", *both)


@dataclass(frozen=True)
class OfFormula(_OfOne):
    """A setting in which a step has the loss and the gradient that the formula has in float64."""

    def __str__(self) -> str:
        return f"{self.setting}: the formula"

    def violations(self, run_of: RunOf) -> Iterator[Difference]:
        run = run_of(self.setting)
        loss, gradients = run.by_hand
        step = STEP - run.first_step
        yield from numbers("formula and ", [{"loss": loss}], [{"loss": run.logs[step]["loss"]}], STEP)
        yield from tensors(f"gradient by formula and of step {STEP}", gradients, run.gradients[step])
