"""Claims about the model that is trained, and about options that change no number."""

from __future__ import annotations

from collections.abc import Iterator

from .claims import ALL, EFFECTS, SEEDED, TRAINED, Claim, Moves, Pair, Values
from .of_steps import EACH_STEP, PLAIN
from .recipes import Recipe
from .setting import Setting

FIRST_STEP = frozenset({"first step"})
WEIGHTS = frozenset({"weights"})


def adapters(recipe: Recipe) -> Iterator[Claim]:
    by_config, by_model = PLAIN.but(adapter="config"), PLAIN.but(adapter="model")
    # Of a model with an adapter TRL keeps a copy as the reference, which is not trained.
    yield Pair(by_config, by_model, frozenset({"gradients", "logs"}))
    yield Pair(by_model, PLAIN.but(adapter="path"))
    yield Pair(by_config, by_config.but(second=True))
    # A new adapter adds nothing yet.
    if recipe.fresh:
        for setting in (by_config, by_model):
            yield Values(setting, recipe.fresh)
    # Beside a reference, an adapter has another: the base.
    if recipe.second_model != "ref_model":
        yield Pair(PLAIN, by_config, FIRST_STEP)
    yield Pair(by_config.but(drawn=1), by_config.but(drawn=2), TRAINED)
    slowly = {"optim": "adamw_torch", "learning_rate": 1e-6}
    for dtype in ("float32", "bfloat16"):
        yield Moves(by_config.but(dtype=dtype, arguments=slowly))


def limits(recipe: Recipe) -> Iterator[Claim]:
    for name, value in recipe.neutral:
        yield Pair(PLAIN, PLAIN.but(arguments={name: value}), TRAINED if name in _LOG_MORE else ALL)
    equal = Setting(batch_size=8, equal_lengths=True)
    for name, one, other in recipe.agree_on_equal_lengths:
        # The divergence is corrected by a ratio of that level.
        rest = {"beta": 0.0} if name == "importance_sampling_level" else {}
        left, right = (equal.but(arguments={name: value, **rest}) for value in (one, other))
        yield Pair(left, right, TRAINED)
    if recipe.generates:
        yield Pair(PLAIN.but(arguments={"beta": 0.0}), PLAIN.but(arguments={"beta": 1e-9}), TRAINED)
        # Advantages that are not divided by their deviation double with the rewards.
        halved = PLAIN.but(arguments={"beta": 0.0, **_UNSCALED.get(recipe.name, {}), "learning_rate": 0.025})
        doubled = {"reward_weights": [2.0], "learning_rate": 0.025}
        yield Pair(halved.but(arguments={"learning_rate": 0.05}), halved.but(arguments=doubled), WEIGHTS)
        sampled = PLAIN.but(samples=True)
        yield Pair(sampled, sampled.but(arguments={"top_p": 1 - 1e-7}))


_LOG_MORE = ("rpo_alpha",)
"""Options that log a term of their own, whatever its weight."""

_UNSCALED = {"GRPO": {"scale_rewards": False}, "RLOO": {"normalize_advantages": False}}


def effects(recipe: Recipe) -> Iterator[Claim]:
    yield Pair(PLAIN, PLAIN, EFFECTS)
    each_step = PLAIN.but(evaluates="held out", arguments=EACH_STEP)
    yield Pair(each_step, each_step, EFFECTS)
    # The seed says all that is random.
    yield Pair(PLAIN.but(drawn=1), PLAIN.but(drawn=2), SEEDED)
