"""Claims about the same rows, model or numbers in another form. They are made about TRL's main trainers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .architectures import ARCHITECTURES
from .claims import TRAINED, Averaged, Claim, OfFormula, Pair, Saved, Unlike
from .of_steps import PLAIN
from .recipes import Recipe
from .setting import ROWS, Setting
from .stand_ins import LIGER

MAIN = ("SFT", "DPO", "GRPO")


def formats(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name not in MAIN:
        return
    # Of a prompt apart all tokens count, as they do of a text.
    plain = PLAIN.but(arguments={"completion_only_loss": False}) if recipe.name == "SFT" else PLAIN
    if recipe.name == "SFT":
        for one, other in _SAME:
            yield Pair(PLAIN.but(form=one), PLAIN.but(form=other))
    for held in ("path", "bytes"):
        yield Pair(PLAIN.but(images="picture"), PLAIN.but(images=held))
    for form in _FORMS[recipe.name]:
        yield Pair(PLAIN, (plain if "two" in form or "completion" in form else PLAIN).but(form=form))
    ordered = PLAIN.but(arguments={"shuffle_dataset": False}) if recipe.generates else PLAIN.but(in_order=True)
    yield Pair(ordered, ordered.but(data="stream"))
    yield Pair(PLAIN, PLAIN.but(arguments={"dataset_num_proc": 2}))
    yield Pair(PLAIN, PLAIN.but(marks="pad is end"))
    # A tokenizer that writes the end itself writes what TRL would.
    if recipe.name != "GRPO":
        yield Pair(PLAIN, PLAIN.but(marks="end"))
    begun = PLAIN.but(marks="begin")
    for form in _FORMS[recipe.name][:2]:
        yield Pair(begun, (begun.but(arguments=plain.arguments) if "completion" in form else begun).but(form=form))


_SAME = (
    ("text of calls in a template", "conversation with calls"),
    ("conversation and tools as JSON", "conversation and tools"),
    ("tokens of a template with words behind the end", "conversation with words behind the end"),
)
"""Forms of the same rows."""

_FORMS: dict[str, Sequence[str]] = {
    "SFT": ("prompt and completion", "conversation", "tokens", "conversation in two", "extra column"),
    "DPO": ("conversation", "conversation without prompt", "extra column"),
    "GRPO": ("conversation", "extra column"),
}


def models(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name not in MAIN:
        return
    by_path = PLAIN.but(by_path=True)
    yield Pair(PLAIN, by_path)
    yield Pair(by_path, by_path.but(arguments={"model_init_kwargs": {"device_map": {"": "cpu"}}}))
    if recipe.second_model == "ref_model":
        yield Pair(PLAIN.but(reference="same"), PLAIN.but(reference="none"))
    seeing = Setting(images="picture", arguments=_LOSS.get(recipe.name, {}))
    yield Pair(seeing, seeing.but(batch_size=4, accumulation=2), TRAINED)
    yield Unlike(seeing, seeing.but(images="another"))
    for architecture in ARCHITECTURES:
        odd = Setting(architecture=architecture, arguments=_LOSS.get(recipe.name, {}))
        yield Pair(odd, odd.but(batch_size=4, accumulation=2, width=16), TRAINED)


def options(recipe: Recipe) -> Iterator[Claim]:
    yield Pair(PLAIN, PLAIN.but(arguments={"dataloader_num_workers": 1}))
    for setting in (PLAIN, PLAIN.but(adapter="config")):
        yield Pair(setting, setting.but(arguments={"gradient_checkpointing": True}))
    # Its losses, since its kernels need a GPU.
    for name in LIGER if recipe.name in ("DPO", "KTO", "GRPO") else ():
        for setting in (PLAIN, Setting(batch_size=4, accumulation=2)):
            yield Pair(setting, setting.but(arguments={name: True}), TRAINED)
    if recipe.name not in MAIN:
        return
    yield Pair(PLAIN, PLAIN.but(arguments={"torch_compile": True, "torch_compile_backend": "eager"}))
    yield Pair(PLAIN, PLAIN.but(arguments={"padding_free": True, "max_length": None}), TRAINED)
    # Packs of all rows are a batch of all rows. Before there were strategies, a row went on in the next pack.
    whole = Setting(batch_size=ROWS)
    yield Pair(whole, whole.but(arguments={"packing": True, "packing_strategy": "bfd"}), TRAINED)
    if recipe.name == "SFT":
        for architecture in ("", *ARCHITECTURES):
            odd = PLAIN.but(architecture=architecture)
            yield Pair(odd, odd.but(arguments={"loss_type": "chunked_nll"}))
    if recipe.generates:
        sampled = PLAIN.but(samples=True)
        yield Pair(sampled, sampled.but(arguments={"generation_kwargs": {"use_cache": False}}))
        for option in ("use_transformers_paged", "use_transformers_continuous_batching"):
            yield Pair(PLAIN, PLAIN.but(arguments={option: True}))
        # A server says how probable its answers were, by the weights that it has been sent.
        for setting in (PLAIN, PLAIN.but(adapter="config"), Setting(batch_size=4, accumulation=2)):
            yield Pair(setting, setting.but(arguments={"use_vllm": True}), TRAINED)


def logging(recipe: Recipe) -> Iterator[Claim]:
    yield Pair(PLAIN, PLAIN.but(arguments={"logging_steps": 1, "logging_first_step": True}))
    yield Averaged(PLAIN, PLAIN.but(arguments={"logging_steps": 3}))


def saving(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name not in MAIN:
        return
    for setting in (
        PLAIN,
        PLAIN.but(adapter="config"),
        PLAIN.but(adapter="model"),
        PLAIN.but(architecture="shared"),
        PLAIN.but(dtype="bfloat16"),
    ):
        yield Saved(setting.but(saves=True))


def formulas(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name not in MAIN:
        return
    plain = Setting(by_hand=recipe.name, arguments=_LOSS.get(recipe.name, {}))
    yield OfFormula(plain)
    for loss_type in _OTHER_LOSSES[recipe.name]:
        yield OfFormula(plain.but(arguments={"loss_type": loss_type}))
    for architecture in ARCHITECTURES:
        yield OfFormula(plain.but(architecture=architecture))


_LOSS = {"GRPO": {"loss_type": "grpo"}}
"""A loss that is no statistic of its batch, where the default of a release is one."""

_OTHER_LOSSES: dict[str, Sequence[str]] = {"SFT": (), "DPO": ("hinge", "ipo"), "GRPO": ("bnpo", "dr_grpo", "dapo")}
