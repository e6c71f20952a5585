"""Claims about what a trainer is given in two ways, and about options that are not at their default."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

# What they define has a name in FORMS, CHANGES and FORMULAS then.
from . import changed_models as _models  # noqa: F401
from . import changed_rewards as _rewards  # noqa: F401
from . import changed_rows as _rows  # noqa: F401
from . import more_formulas as _formulas  # noqa: F401
from . import texts as _texts  # noqa: F401
from .by_hand import FORMULAS
from .changes import changed
from .claims import TRAINED, Claim, Moves, OfFormula, Pair, Unlike, Unmoved, Values
from .of_forms import LOSS
from .of_models import FIRST_STEP, WEIGHTS
from .of_steps import PLAIN
from .recipes import Recipe
from .setting import ROWS, Setting
from .stand_ins import LIGER

GRADIENTS = frozenset({"gradients"})
SLOWLY = {"optim": "adamw_torch", "learning_rate": 1e-6}
SEEING = Setting(images="picture")

_PAIRED = ("DPO", "CPO", "ORPO", "TPO", "KTO", "Reward", "BCO")
_ON_POLICY = ("GRPO", "RLOO")


def accumulation(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name == "GRPO":
        # Each generation is of half a step.
        halves = Setting(batch_size=8, accumulation=2, equal_lengths=True, arguments={"steps_per_generation": 1})
        for name in ("dapo", "grpo"):
            loss = {"loss_type": name}
            yield Pair(Setting(batch_size=16, equal_lengths=True, arguments=loss), halves.but(arguments=loss), TRAINED)
    # A trainer of rewards drops the rows that are too long.
    if recipe.rows in ("pairs", "labelled") and not recipe.labels:
        for mode in ("keep_start", "keep_end"):
            cut = Setting(arguments={"max_length": 6, "truncation_mode": mode})
            yield Pair(cut, cut.but(batch_size=2, accumulation=4), TRAINED)
        cut = Setting(arguments={"max_length": 6})
        yield Pair(cut, cut.but(batch_size=2, accumulation=4), TRAINED)
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


def formats(recipe: Recipe) -> Iterator[Claim]:
    begun = PLAIN.but(marks="begin")
    if recipe.rows in ("text", "pairs", "labelled", "prompts", "triples"):
        form = {"labelled": "conversation with label", "triples": "conversation of three"}.get(
            recipe.rows, "conversation"
        )
        yield Pair(begun.but(form=form), begun.but(form="text of a template"))
    for form in _BEGINNING.get(recipe.rows, ()):
        yield Pair(PLAIN.but(form=form), PLAIN.but(form=form, marks="begin"))
    if recipe.name == "SFT":
        yield from _of_texts()
        yield from _of_images_of_sft()
    if recipe.rows == "pairs":
        yield Pair(PLAIN.but(form="pair without prompt"), PLAIN.but(form="pair without prompt that ends with a space"))
        yield Pair(
            PLAIN.but(form="pair whose chosen answer has a header"),
            PLAIN.but(form="conversation whose prompt begins the answer"),
        )
    if recipe.rows == "prompts":
        yield Pair(PLAIN, PLAIN.but(form="conversation that begins the answer"))
        shorter = PLAIN.but(arguments={"max_prompt_length": 2})
        yield Pair(shorter.but(form="last two words"), shorter)
    if recipe.name == "DPO":
        by_text = PLAIN.but(arguments={"f_divergence_type": "js_divergence"})
        yield Pair(by_text, changed(by_text, "a divergence by its constant"))
        yield Unlike(changed(SEEING, "images in conversations"), changed(SEEING, "images and tools in conversations"))
    if recipe.rows == "labelled":
        # A batch has answers of both kinds. A policy that is its own reference has no rewards yet.
        own = changed(PLAIN.but(reference="same"), "rows in pairs")
        yield Values(own, {"rewards/chosen": 0.0, "rewards/rejected": 0.0})
    if recipe.name == "GKD":
        # A prompt that stands alone has no padding, which the table would read.
        alone = Setting(batch_size=1, accumulation=8, arguments={"lmbda": 1.0})
        yield Pair(alone, alone.but(marks="pad is end"), TRAINED)


_BEGINNING: dict[str, Sequence[str]] = {
    "text": ("conversation with a beginning",),
    "pairs": ("conversation with a beginning", "conversation without prompt with a beginning"),
    "prompts": ("conversation with a beginning",),
    "labelled": ("conversation with label and a beginning",),
}
"""Conversations whose template writes the beginning of a sequence, whatever the tokenizer does."""


def _of_texts() -> Iterator[Claim]:
    whole = {"completion_only_loss": False}
    for one, other in (
        (PLAIN, PLAIN.but(form="another field", arguments={"dataset_text_field": "story"})),
        (
            PLAIN.but(form="prompt and completion", arguments=whole),
            PLAIN.but(form="prompt and completion beside a text", arguments=whole),
        ),
        (PLAIN.but(form="conversation"), PLAIN.but(form="conversation by from and value")),
        (changed(PLAIN, "a word more"), changed(PLAIN.but(form="conversation"), "a function that adds a word")),
        (
            changed(PLAIN, "a collator that masks the prompt"),
            changed(PLAIN, "a collator that masks the prompt and does not pad"),
        ),
    ):
        yield Pair(one, other)
    yield Unlike(PLAIN.but(form="tokens"), PLAIN.but(form="tokens with labels"))
    answers = PLAIN.but(arguments={"completion_only_loss": True})
    yield Pair(answers.but(form="prompt with a header"), answers.but(form="conversation with a header"))
    yield Pair(answers, answers.but(form="prompt that ends inside a word"))
    marked = PLAIN.but(form="conversation with its answers marked", arguments={"assistant_only_loss": True})
    yield Pair(answers.but(form="conversation cut before the answer"), marked)


def _of_images_of_sft() -> Iterator[Claim]:
    yield Unlike(changed(SEEING, "images in conversations"), changed(SEEING, "images and tools in conversations"))
    yield Pair(changed(SEEING, "images in conversations in two"), changed(SEEING, "images in texts"), TRAINED)
    # A prompt without a word has no word that is trained on.
    of_answers = changed(SEEING, "images that are the whole prompt, cut before the answer")
    yield Pair(of_answers, changed(SEEING, "images that are the whole prompt"), TRAINED)


def options(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name == "SFT":
        # Some rows are cut. Of an answer each token is predicted, in a pack too.
        short = Setting(batch_size=ROWS, arguments={"max_length": 8, "completion_only_loss": True})
        for strategy in ("bfd", "ffd"):
            yield Pair(short, short.but(arguments={"packing": True, "packing_strategy": strategy}), TRAINED)
        # More rows than datasets maps at a time.
        wrapped = {"packing": True, "packing_strategy": "wrapped", "max_length": 16}
        packed = Setting(batch_size=64, order=_MANY, arguments=wrapped)
        yield Pair(packed, packed.but(form="tokens"), TRAINED)
        for mask in ("completion_only_loss", "assistant_only_loss"):
            masked = PLAIN.but(arguments={mask: True})
            yield Pair(masked, masked.but(arguments={"use_liger_kernel": True}), TRAINED)
        whole = PLAIN.but(arguments={"loss_type": "nll"})
        for odd in (whole.but(architecture="divided"), changed(whole, "a recurrent model")):
            yield Pair(odd, odd.but(arguments={"loss_type": "chunked_nll"}), TRAINED)
    if recipe.name == "DPO":
        yield from _flat_losses()
    if recipe.generates:
        half = PLAIN.but(adapter="config", dtype="bfloat16")
        yield Unmoved(half, half.but(arguments={"use_vllm": True}))
    if recipe.name in (*_ON_POLICY, "OnlineDPO"):
        half = PLAIN.but(arguments={"bf16": True})
        for option in ("use_transformers_paged", "use_transformers_continuous_batching"):
            yield Pair(half, half.but(arguments={option: True}), TRAINED)
        begun = PLAIN.but(marks="begin")
        for form in ("conversation", "text of a template"):
            yield Pair(begun.but(form=form), begun.but(form=form, arguments={"use_vllm": True}), TRAINED)
    for adapter in ("config", "model"):
        lora = PLAIN.but(adapter=adapter)
        kept = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        yield Pair(lora, lora.but(arguments=kept))


_MANY = tuple(random.Random(1).choices(range(ROWS), k=1200))


def _flat_losses() -> Iterator[Claim]:
    flat = {"padding_free": True, "max_length": None}
    for loss in (
        {"loss_type": "ipo"},
        {"rpo_alpha": 1.0},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"use_logits_to_keep": True},
    ):
        yield Pair(PLAIN.but(arguments=loss), PLAIN.but(arguments={**loss, **flat}), TRAINED)
    for name in LIGER:
        yield Pair(PLAIN.but(arguments={name: True}), PLAIN.but(arguments={name: True, **flat}), TRAINED)


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
    if recipe.name in _ON_POLICY:
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
    if recipe.name in _ON_POLICY:
        yield Values(changed(PLAIN, "a model loaded in bfloat16"), recipe.fresh)
    losses = ({}, {"label_smoothing_factor": 0.1}) if recipe.name == "SFT" else ({},)
    for loss in losses if recipe.name in ("SFT", "DPO", "KTO") else ():
        plain = PLAIN.but(arguments=loss)
        yield Unlike(plain.but(architecture="balanced"), plain.but(architecture="unbalanced"))
    if recipe.name == "Reward":
        yield Pair(PLAIN.but(by_path=True), changed(PLAIN, "no labels in its config"))


def formulas(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name in FORMULAS:
        plain = Setting(by_hand=recipe.name, arguments=LOSS.get(recipe.name, {}))
        yield OfFormula(plain.but(batch_size=4))
        # The longest prompts of these rows have no long answers.
        yield OfFormula(plain.but(order=_UNEVEN))
    for name, formula, options in _FORMULAS:
        if name == recipe.name:
            yield OfFormula(Setting(by_hand=formula, arguments=options))
    if recipe.name == "DPO":
        weighted = Setting(by_hand="DPO with weights", arguments={"use_weighting": True})
        for setting in (weighted, changed(weighted, "answers that the model would give")):
            yield OfFormula(setting)
    if recipe.name == "CPO":
        yield OfFormula(Setting(by_hand="CPO of one end", form="conversation with a line behind the end"))
    if recipe.name == "SFT":
        # Of an answer the first token counts, since it is predicted.
        answers = {"completion_only_loss": True}
        yield OfFormula(Setting(by_hand="SFT of experts", architecture="balanced", arguments=answers))
    if recipe.name == "GRPO":
        for options in ({"loss_type": "dapo", "mask_truncated_completions": True},):
            yield OfFormula(changed(Setting(by_hand="GRPO", arguments=options), "answers without an end"))


_UNEVEN = (0, 1, 3, 4, 10, 13, 15, 16, 0, 1, 3, 4, 10, 13, 15, 16, 0, 1, 3, 4)

_FORMULAS: Sequence[tuple[str, str, dict[str, object]]] = (
    ("DPO", "DPO of JS", {"f_divergence_type": "js_divergence"}),
    ("DPO", "DPO of alpha", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5}),
    ("GRPO", "GRPO by sequence", {}),
    ("GRPO", "GRPO at a temperature", {"temperature": 0.7, "beta": 0.0, "loss_type": "grpo"}),
    ("GRPO", "GRPO at a temperature", {"temperature": 0.7, "beta": 0.0}),
)
