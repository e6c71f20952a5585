"""The relations: two runs, or two ways to the same number, that must agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .materials import GROUP
from .recipes import Recipe
from .setting import ROWS, Setting

TRAINED = frozenset({"gradients", "weights"})
ALL = TRAINED | {"logs"}
EVALUATED = frozenset({"evaluations"})
EFFECTS = frozenset({"effects"})


@dataclass(frozen=True)
class Pair:
    """Two settings whose runs must agree, and in what."""

    left: Setting
    right: Setting
    of: frozenset[str] = ALL

    def __str__(self) -> str:
        return f"{self.left} = {self.right}"


@dataclass(frozen=True)
class Values:
    """A setting in which the first step must log these numbers."""

    setting: Setting
    numbers: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.setting}: {', '.join(f'{name} {value:.4g}' for name, value in self.numbers.items())}"


Claim = Pair | Values


@dataclass(frozen=True)
class Relation:
    """What must hold of each trainer, why, and the claims that show it."""

    name: str
    why: str
    claims: Callable[[Recipe], Iterator[Claim]]


def _accumulation(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting()
    for batch_size, accumulation in ((4, 2), (2, 4), (1, 8)):
        yield Pair(plain, plain.but(batch_size=batch_size, accumulation=accumulation))


def _ranks(recipe: Recipe) -> Iterator[Claim]:
    # Of an incomplete last batch the ranks would repeat rows, as accelerate means it.
    plain = Setting(arguments={"max_steps": 2})
    yield Pair(plain, plain.but(batch_size=4, ranks=2))
    each_step = plain.but(evaluates=True, arguments={"eval_strategy": "steps", "eval_steps": 1})
    yield Pair(each_step, each_step.but(batch_size=4, ranks=2), EVALUATED)


def _padding(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting()
    yield Pair(plain, plain.but(padding_side="right" if recipe.side == "left" else "left"))
    # The embedding itself is a weight.
    yield Pair(plain, plain.but(pad_embedding=3.0), frozenset({"logs"}))
    yield Pair(plain, plain.but(width=16))


def _order(recipe: Recipe) -> Iterator[Claim]:
    # One batch has all rows, so that each step is over the same ones.
    whole = Setting(batch_size=ROWS * GROUP if recipe.generates else ROWS)
    for seed in (1, 2):
        shuffled = list(range(ROWS))
        random.Random(seed).shuffle(shuffled)
        yield Pair(whole, whole.but(order=tuple(shuffled)))


def _resume(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting(batch_size=4)
    yield Pair(plain, plain.but(resume_at=2))
    several = plain.but(batch_size=2, accumulation=2)
    yield Pair(several, several.but(resume_at=2))
    # Eight rows are a step, twenty an epoch: the third step ends it, and the fourth is in the second.
    later = Setting(arguments={"max_steps": 5})
    yield Pair(later, later.but(resume_at=4))
    for adapter in ("config", "model"):
        with_adapter = plain.but(adapter=adapter)
        yield Pair(with_adapter, with_adapter.but(resume_at=2))
    if recipe.generates:
        for argument in ("num_iterations", "steps_per_generation"):
            reused = plain.but(arguments={argument: 2, "max_steps": 4})
            yield Pair(reused, reused.but(resume_at=1))


def _evaluation(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting(batch_size=4)
    each_step = plain.but(evaluates=True, arguments={"eval_strategy": "steps", "eval_steps": 1})
    yield Pair(plain, each_step)
    for size in (1, 2, 9) if not recipe.generates else (8, 12):
        yield Pair(each_step, each_step.but(eval_batch_size=size), EVALUATED)


def _adapters(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting(batch_size=4, adapter="config")
    yield Pair(plain, plain.but(adapter="model"), frozenset({"logs"}))
    # A new adapter adds nothing yet.
    if recipe.fresh:
        for adapter in ("config", "model"):
            yield Values(plain.but(adapter=adapter), recipe.fresh)


def _limits(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting(batch_size=4)
    for name, value in recipe.neutral:
        yield Pair(plain, plain.but(arguments={name: value}))
    equal = Setting(batch_size=8, equal_lengths=True)
    for name, one, other in recipe.agree_on_equal_lengths:
        yield Pair(equal.but(arguments={name: one}), equal.but(arguments={name: other}), TRAINED)


def _options(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting(batch_size=4)
    yield Pair(plain, plain.but(arguments={"dataloader_num_workers": 1}))
    yield Pair(plain, plain.but(arguments={"gradient_checkpointing": True}))
    yield Pair(plain, plain.but(arguments={"logging_steps": 1, "logging_first_step": True}))


def _effects(recipe: Recipe) -> Iterator[Claim]:
    plain = Setting(batch_size=4)
    yield Pair(plain, plain, EFFECTS)


RELATIONS = {
    relation.name: relation
    for relation in (
        Relation("accumulation", "A step is over the same rows, however many are computed at a time.", _accumulation),
        Relation("ranks", "A step is over the same rows, however many processes share them.", _ranks),
        Relation(
            "padding", "Padding is no part of a text. Where it stands and how much there is says nothing.", _padding
        ),
        Relation("order", "A loss is a sum over the rows of a batch, and a sum has no order.", _order),
        Relation("resume", "A run that is saved and goes on is the run that was never stopped.", _resume),
        Relation(
            "evaluation", "To look at a model does not change it, and shows the same in any batch size.", _evaluation
        ),
        Relation("adapters", "A new adapter is the base, and peft_config makes what get_peft_model makes.", _adapters),
        Relation(
            "limits", "At its neutral value an option changes nothing, and at equal lengths means agree.", _limits
        ),
        Relation("options", "Workers and checkpointing say how a step is computed, not what it is.", _options),
        Relation("effects", "A trainer changes the model's weights, and nothing else that it was given.", _effects),
    )
}
