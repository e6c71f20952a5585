"""More claims about the steps of a run: rows that are cut or all the same, parts of a generation, and engines."""

from __future__ import annotations

from collections.abc import Iterator

from .changes import changed
from .claims import TRAINED, Claim, Pair, Unlike
from .of_forms import BY_BATCH, ROW_BY_ROW
from .of_models import WEIGHTS
from .recipes import Recipe
from .setting import ROWS, Setting
from .stand_ins import LIGER

GRADIENTS = frozenset({"gradients"})
SEEING = Setting(images="picture")


def accumulation(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name == "GRPO":
        # Each generation is of half a step.
        halves = Setting(batch_size=8, accumulation=2, equal_lengths=True, arguments={"steps_per_generation": 1})
        for name in ("dapo", "grpo"):
            loss = {"loss_type": name}
            yield Pair(Setting(batch_size=16, equal_lengths=True, arguments=loss), halves.but(arguments=loss), TRAINED)
    # A trainer of rewards drops the rows that are too long.
    if recipe.rows in ("pairs", "labelled") and not recipe.labels and recipe.name not in BY_BATCH:
        cut = Setting(arguments={**ROW_BY_ROW.get(recipe.name, {}), "max_length": 6})
        for mode in ({}, {"truncation_mode": "keep_start"}, {"truncation_mode": "keep_end"}):
            setting = cut.but(arguments=mode)
            yield Pair(setting, setting.but(batch_size=2, accumulation=4), TRAINED)
    if recipe.name == "SFT":
        seeing = changed(SEEING, "loss by token")
        yield Pair(seeing, seeing.but(batch_size=4, accumulation=2), TRAINED)
    if not recipe.labels and not recipe.answers:
        # Of rows that are all the same, what is computed of a batch is the same in each part.
        same = _same_rows(recipe)
        yield Pair(same, same.but(batch_size=2, accumulation=4), TRAINED)


def _same_rows(recipe: Recipe) -> Setting:
    """Return a setting with a router whose loss is one of the batch. Its reference has a router too."""
    balanced = Setting(architecture="balanced", order=(3,) * ROWS)
    return balanced.but(reference="same") if recipe.second_model == "ref_model" else balanced


def padding(recipe: Recipe) -> Iterator[Claim]:
    if recipe.rows in ("pairs", "labelled"):
        # Every row has a prompt of four tokens at most, so that something of each answer is left.
        cut = Setting(arguments={"max_length": 6})
        for setting in (cut, cut.but(arguments={"truncation_mode": "keep_end"})):
            yield Pair(setting, setting.but(width=16), TRAINED)


def ranks(recipe: Recipe) -> Iterator[Claim]:
    two = {"batch_size": 4, "ranks": 2}
    plain = Setting(arguments={"max_steps": 2})
    for name in LIGER if recipe.name in ("DPO", "KTO") else ():
        liger = plain.but(arguments={name: True})
        yield Pair(liger, liger.but(**two), TRAINED)
    if not recipe.labels and not recipe.answers:
        same = _same_rows(recipe).but(arguments=plain.arguments)
        yield Pair(same, same.but(**two), TRAINED)
    if recipe.generates:
        # Two ranks with the same prompt draw other answers.
        same = Setting(batch_size=4, samples=True, order=(3,) * ROWS)
        yield Unlike(same, same.but(ranks=2))
    # The last window of an epoch has fewer micro-batches, and many ones are more than two.
    for setting in (Setting(batch_size=2, accumulation=2, ranks=2), plain.but(batch_size=1, accumulation=4, ranks=2)):
        for engine in ("zero 1", "zero 2 offloaded"):
            yield Pair(setting, setting.but(engine=engine), WEIGHTS)


def resume(recipe: Recipe) -> Iterator[Claim]:
    if recipe.generates:
        # Eighty answers are an epoch.
        later = Setting(arguments={"max_steps": 12})
        yield Pair(later, later.but(resume_at=11))
        # Of a model that stands still each gradient shows the prompts of its step.
        still = Setting(arguments={"num_iterations": 2, "max_steps": 4, "learning_rate": 0.0})
        yield Pair(still, still.but(resume_at=1), GRADIENTS)
