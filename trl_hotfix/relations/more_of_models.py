"""More claims about the model that is trained, those beside it, and options that change no number."""

from __future__ import annotations

from collections.abc import Iterator

# What they define has a name in CHANGES then.
from . import changed_models as _models  # noqa: F401
from . import changed_rewards as _rewards  # noqa: F401
from .changes import changed
from .claims import TRAINED, Claim, Moves, Pair, Unlike, Values
from .more_of_forms import ON_POLICY
from .more_of_steps import GRADIENTS
from .of_models import FIRST_STEP
from .of_steps import PLAIN
from .recipes import Recipe
from .setting import ROWS, Setting

SLOWLY = {"optim": "adamw_torch", "learning_rate": 1e-6}


def limits(recipe: Recipe) -> Iterator[Claim]:
    if "precompute_ref_log_probs" in dict(recipe.neutral):
        # The reference is the policy before it is trained.
        own = PLAIN.but(reference="none")
        yield Pair(own, own.but(arguments={"precompute_ref_log_probs": True}))
    if recipe.name in ("CPO", "ORPO"):
        yield from certainty(recipe)
    if recipe.name in ("DPO", "KTO"):
        in_order = PLAIN.but(in_order=True, arguments={"max_length": 32})
        yield Pair(in_order, changed(in_order, "rows without room for an answer"), TRAINED)
        before = PLAIN.but(arguments={"precompute_ref_log_probs": True})
        for kept in (before, before.but(arguments={"truncation_mode": "keep_end"})):
            yield Pair(changed(kept, "rows on disk"), changed(kept, "another run before, which cut the rows shorter"))
    if recipe.name == "GRPO":
        clipped = PLAIN.but(arguments={"loss_type": "cispo"})
        yield Pair(clipped, clipped.but(arguments={"epsilon_high": 5.0}), TRAINED)
        unscaled = PLAIN.but(arguments={"scale_rewards": False})
        mean = changed(unscaled, "the mean of the others for some answers")
        yield Pair(mean, changed(unscaled, "no reward for some answers"), TRAINED)
    if recipe.name in ON_POLICY:
        sampled = PLAIN.but(samples=True)
        yield Pair(sampled, changed(sampled, "a temperature of the model's own"), TRAINED)
        one, *others = (
            changed(PLAIN, f"an end {of}") for of in ("of the tokenizer", "of the model", "in generation_kwargs")
        )
        for other in others:
            yield Pair(one, other, TRAINED)
        yield Pair(changed(PLAIN, "a reward model"), changed(PLAIN, "a reward model in train mode"))
        begun = changed(PLAIN.but(marks="begin"), "a reward model")
        yield Pair(begun.but(form="conversation"), begun, TRAINED)


def certainty(recipe: Recipe) -> Iterator[Claim]:
    # One row, again and again, until the model is sure of it.
    often = {"optim": "adamw_torch", "learning_rate": 0.02, "max_steps": 60}
    sure = Setting(order=(3,) * ROWS, dtype="bfloat16", arguments=often)
    yield Pair(sure, sure.but(width=16), GRADIENTS)


def adapters(recipe: Recipe) -> Iterator[Claim]:
    # What was trained is not settled again.
    lora = PLAIN.but(adapter="model", drawn=1)
    if recipe.fresh:
        for setting in (
            changed(lora, "a trained adapter"),
            *(() if recipe.labels else (changed(PLAIN, "a trained IA3"),)),
        ):
            yield Values(setting, recipe.fresh)
    if recipe.name in ("SFT", "GRPO"):
        once, twice = (changed(lora, f"a trained adapter{more}") for more in ("", " and a new one"))
        yield Pair(once, twice, FIRST_STEP)
    if recipe.name in ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward"):
        fresh = PLAIN.but(adapter="model")
        yield Pair(fresh, changed(fresh, "a model marked as quantised"), GRADIENTS)
        by_config = PLAIN.but(adapter="config", arguments=SLOWLY)
        yield Moves(changed(by_config, "a model marked as quantised"))
        yield Moves(changed(by_config, "a DoRA of a model marked as quantised"))


def models(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name in ON_POLICY:
        yield Values(changed(PLAIN, "a model loaded in bfloat16"), recipe.fresh)
    losses = ({}, {"label_smoothing_factor": 0.1}) if recipe.name == "SFT" else ({},)
    for loss in losses if recipe.name in ("SFT", "DPO", "KTO") else ():
        plain = PLAIN.but(arguments=loss)
        yield Unlike(plain.but(architecture="balanced"), plain.but(architecture="unbalanced"))
    if recipe.name == "Reward":
        yield Pair(PLAIN.but(by_path=True), changed(PLAIN, "no labels in its config"))
