"""More claims about the same rows in another form, and about options and formulas that are not the default."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

# What they define has a name in FORMS, CHANGES and FORMULAS then.
from . import changed_rows as _rows  # noqa: F401
from . import more_formulas as _formulas  # noqa: F401
from . import texts as _texts  # noqa: F401
from .by_hand import FORMULAS
from .changes import changed
from .claims import TRAINED, Claim, OfFormula, Pair, Unlike, Unmoved, Values
from .more_of_steps import SEEING
from .of_forms import LOSS
from .of_steps import PLAIN
from .recipes import Recipe
from .setting import ROWS, Setting
from .stand_ins import LIGER

ON_POLICY = ("GRPO", "RLOO")


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
    if recipe.name in (*ON_POLICY, "OnlineDPO"):
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
