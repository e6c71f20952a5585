"""Claims about the steps of a run: which rows, in which batches, before and after which others."""

from __future__ import annotations

import random
from collections.abc import Iterator

from .claims import EVALUATED, Claim, Pair, Standstill
from .engines import ENGINES
from .materials import GROUP
from .recipes import Recipe
from .setting import ROWS, Setting

PLAIN = Setting(batch_size=4)
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1}


def variants(recipe: Recipe, setting: Setting) -> Iterator[Setting]:
    """Give the setting with each other loss that the trainer computes."""
    for options in recipe.variants:
        yield setting.but(arguments=options)


def accumulation(recipe: Recipe) -> Iterator[Claim]:
    for batch_size, times in ((4, 2), (2, 4), (1, 8)):
        if batch_size >= recipe.least:
            yield Pair(Setting(), Setting(batch_size=batch_size, accumulation=times))
    for variant in variants(recipe, Setting()):
        yield Pair(variant, variant.but(batch_size=2, accumulation=4))


def ranks(recipe: Recipe) -> Iterator[Claim]:
    # Without the last step of the epoch, which has too few rows for all ranks.
    plain = Setting(arguments={"max_steps": 2})
    yield Pair(plain, plain.but(batch_size=4, ranks=2))
    yield Pair(plain, plain.but(batch_size=2, ranks=4))
    yield Pair(plain, plain.but(batch_size=2, accumulation=2, ranks=2))
    for engine in ENGINES:
        # An engine keeps the gradients.
        sharded = plain.but(batch_size=2, accumulation=2, ranks=2)
        yield Pair(sharded, sharded.but(engine=engine), frozenset({"weights", "logs"}))
    if "precompute_ref_log_probs" in dict(recipe.neutral):
        precomputed = plain.but(arguments={"precompute_ref_log_probs": True})
        yield Pair(precomputed, precomputed.but(batch_size=4, ranks=2))
    if not recipe.generates:
        # accelerate fills the last batch with the first rows of the epoch.
        filled = Setting(order=(*range(ROWS), *range(8 - ROWS % 8)), in_order=True)
        for batch_size, number in ((4, 2), (2, 4)):
            yield Pair(filled, Setting(batch_size=batch_size, ranks=number, in_order=True))
    each_step = plain.but(evaluates="held out", arguments=EACH_STEP)
    for batch_size, number in ((4, 2), (2, 4)):
        yield Pair(each_step, each_step.but(batch_size=batch_size, ranks=number), EVALUATED)
    for variant in variants(recipe, plain):
        # So few packs are no two steps.
        if "packing" not in variant.arguments:
            yield Pair(variant, variant.but(batch_size=4, ranks=2))


def padding(recipe: Recipe) -> Iterator[Claim]:
    plain, other_side = Setting(), "right" if recipe.side == "left" else "left"
    yield Pair(plain, plain.but(padding_side=other_side))
    # The embedding itself is a weight.
    yield Pair(plain, plain.but(pad_embedding=3.0), frozenset({"logs"}))
    for width in (7, 16):
        yield Pair(plain, plain.but(width=width))
    for variant in variants(recipe, plain):
        yield Pair(variant, variant.but(width=16, padding_side=other_side))


def order(recipe: Recipe) -> Iterator[Claim]:
    # One batch has all rows, so that each step is over the same ones.
    whole = Setting(batch_size=ROWS * GROUP if recipe.generates else ROWS)
    for seed in (1, 2):
        yield Pair(whole, whole.but(order=_shuffled(seed)))
    if recipe.generates:
        yield Pair(whole, whole.but(answers_from=2))
    for variant in variants(recipe, whole):
        yield Pair(variant, variant.but(order=_shuffled(1)))


def _shuffled(seed: int) -> tuple[int, ...]:
    numbers = list(range(ROWS))
    random.Random(seed).shuffle(numbers)
    return tuple(numbers)


def resume(recipe: Recipe) -> Iterator[Claim]:
    for plain in (
        PLAIN,
        Setting(batch_size=4, accumulation=2),
        PLAIN.but(adapter="config"),
        PLAIN.but(adapter="model"),
        PLAIN.but(arguments={"precompute_ref_log_probs": True}),
        PLAIN.but(arguments={"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}),
        Setting(batch_size=1, arguments={"packing": True}),
        PLAIN.but(data="stream"),
        PLAIN.but(callback="BEMACallback"),
    ):
        yield Pair(plain, plain.but(resume_at=2))
    # Eight rows are a step, twenty an epoch: the third step ends it, and the fourth is in the second.
    later = Setting(arguments={"max_steps": 5})
    yield Pair(later, later.but(resume_at=4))
    if recipe.generates:
        for argument in ("num_iterations", "steps_per_generation"):
            reused = PLAIN.but(arguments={argument: 2, "max_steps": 4, "learning_rate": 0.005})
            yield Pair(reused, reused.but(resume_at=1))


def evaluation(recipe: Recipe) -> Iterator[Claim]:
    each_step = PLAIN.but(evaluates="held out", arguments=EACH_STEP)
    for setting in (PLAIN, *variants(recipe, PLAIN)):
        yield Pair(setting, setting.but(evaluates="held out", arguments=EACH_STEP))
    for size in (1, 2, 9) if not recipe.generates else (8, 12):
        yield Pair(each_step, each_step.but(eval_batch_size=size), EVALUATED)
    yield Pair(each_step, each_step.but(evaluates="two sets"), EVALUATED, part="first")
    rows = ROWS * GROUP if recipe.generates else ROWS
    # A batch of all rows is in order, however a trainer that generates has ordered it.
    still = Setting(batch_size=rows, eval_batch_size=rows, in_order=not recipe.generates, evaluates="training")
    still = still.but(arguments={**EACH_STEP, "learning_rate": 0.0})
    yield Standstill(still)
    yield Standstill(still, twice=True)
