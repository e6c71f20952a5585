"""Claims about the same rows, model or numbers in another form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# What they define has a name in FORMS and FORMULAS then.
from . import conversations as _conversations  # noqa: F401
from . import formulas as _formulas  # noqa: F401
from .by_hand import FORMULAS
from .claims import TRAINED, Averaged, Claim, OfFormula, Pair, Saved, Unlike
from .odd_models import BY_ROW
from .of_steps import PLAIN
from .recipes import Recipe
from .setting import ROWS, Setting
from .stand_ins import LIGER


def formats(recipe: Recipe) -> Iterator[Claim]:
    # Of a prompt apart all tokens count, as they do of a text.
    plain = PLAIN.but(arguments={"completion_only_loss": False}) if recipe.name == "SFT" else PLAIN
    if recipe.name == "SFT":
        for one, other in _SAME:
            yield Pair(PLAIN.but(form=one), PLAIN.but(form=other))
    if recipe.name in _SEEING:
        for held in ("path", "bytes"):
            yield Pair(PLAIN.but(images="picture"), PLAIN.but(images=held))
    for form in _FORMS[recipe.rows]:
        yield Pair(PLAIN, (plain if "two" in form or "completion" in form else PLAIN).but(form=form))
    if recipe.name not in _NO_STREAM:
        ordered = PLAIN.but(arguments={"shuffle_dataset": False}) if recipe.generates else PLAIN.but(in_order=True)
        yield Pair(ordered, ordered.but(data="stream"))
    yield Pair(PLAIN, PLAIN.but(arguments={"dataset_num_proc": 2}))
    # The table of answers knows padding by its number, in a batch of several prompts.
    if recipe.generates or not recipe.answers or recipe.options.get("lmbda") == 0.0:
        yield Pair(PLAIN, PLAIN.but(marks="pad is end"))
    # A tokenizer that writes the end itself writes what TRL would. A prompt alone has no end.
    if recipe.rows in ("text", "pairs", "triples", "labelled"):
        yield Pair(PLAIN, PLAIN.but(marks="end"))
    begun = PLAIN.but(marks="begin")
    for form in _FORMS[recipe.rows][:2]:
        yield Pair(begun, (begun.but(arguments=plain.arguments) if "completion" in form else begun).but(form=form))


_SAME = (
    ("text of calls in a template", "conversation with calls"),
    ("conversation and tools as JSON", "conversation and tools"),
    ("tokens of a template with words behind the end", "conversation with words behind the end"),
)
"""Forms of the same rows."""

_FORMS: dict[str, Sequence[str]] = {
    "text": ("prompt and completion", "conversation", "tokens", "conversation in two", "extra column"),
    "pairs": ("conversation", "conversation without prompt", "extra column"),
    "triples": ("conversation of three", "extra column"),
    "labelled": ("conversation with label", "extra column"),
    "prompts": ("conversation", "extra column"),
    "privileged": ("conversation with context", "extra column"),
    "messages": ("extra column",),
    "conversations": ("extra column",),
    "steps": ("extra column",),
}
"""The forms of each kind of rows, the plain one left out."""

_SEEING = ("SFT", "DPO", "GRPO", "RLOO")
"""Trainers of a model that sees, beside which no other model must see too."""

_NO_STREAM = ("SDFT",)
"""Trainers that name a dataset without a length and then refuse it."""


def models(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name not in _NOT_BY_PATH:
        by_path = PLAIN.but(by_path=True)
        yield Pair(PLAIN, by_path)
        yield Pair(by_path, by_path.but(arguments={"model_init_kwargs": {"device_map": {"": "cpu"}}}))
    if recipe.second_model == "ref_model" and recipe.name not in _ASK_THE_REFERENCE:
        yield Pair(PLAIN.but(reference="same"), PLAIN.but(reference="none"))
    if recipe.name in _SEEING:
        seeing = Setting(images="picture", arguments=ROW_BY_ROW.get(recipe.name, {}))
        yield Pair(seeing, seeing.but(batch_size=4, accumulation=2), TRAINED)
        yield Unlike(seeing, seeing.but(images="another"))
    # They are causal models.
    for architecture in BY_ROW if not recipe.labels else ():
        odd = Setting(architecture=architecture, arguments=ROW_BY_ROW.get(recipe.name, {}))
        in_parts = {"batch_size": 4, "accumulation": 2} if recipe.name not in BY_BATCH else {}
        yield Pair(odd, odd.but(**in_parts, width=16), TRAINED)


ROW_BY_ROW: dict[str, dict[str, object]] = {
    "GRPO": {"loss_type": "grpo"},
    "KTO": {"loss_type": "apo_zero_unpaired"},
    "CPO": {"cpo_alpha": 0.0},
    "TPO": {"tpo_alpha": 0.0},
}
"""A loss that is no statistic of its batch, where the default of a release is one."""

BY_BATCH = ("BCO", "ORPO")
"""Trainers all of whose losses are statistics of the batch."""

_NOT_BY_PATH = ("PPO", "PRM", "A2PO")
"""Trainers that take a model and no path, or a copy of whose model answers from the table too."""

_ASK_THE_REFERENCE = ("XPO", "NashMD", "PPO")
"""Trainers whose reference answers too, or is no argument of this name."""


def options(recipe: Recipe) -> Iterator[Claim]:
    yield Pair(PLAIN, PLAIN.but(arguments={"dataloader_num_workers": 1}))
    for setting in (PLAIN, PLAIN.but(adapter="config")):
        yield Pair(setting, setting.but(arguments={"gradient_checkpointing": True}))
    # Its losses, since its kernels need a GPU.
    for name in LIGER if recipe.name in ("DPO", "KTO", "GRPO", "GKD") else ():
        for setting in (PLAIN, Setting(batch_size=4, accumulation=2)):
            yield Pair(setting, setting.but(arguments={name: True}), TRAINED)
    yield Pair(PLAIN, PLAIN.but(arguments={"torch_compile": True, "torch_compile_backend": "eager"}))
    if recipe.name not in _NOT_FLAT:
        yield Pair(PLAIN, PLAIN.but(arguments={"padding_free": True, "max_length": None}), TRAINED)
        # Packs of all rows are a batch of all rows. Before there were strategies, a row went on in the next pack.
        whole = Setting(batch_size=ROWS)
        yield Pair(whole, whole.but(arguments={"packing": True, "packing_strategy": "bfd"}), TRAINED)
    if recipe.name == "SFT":
        for architecture in ("", *BY_ROW):
            odd = PLAIN.but(architecture=architecture)
            yield Pair(odd, odd.but(arguments={"loss_type": "chunked_nll"}))
    if recipe.answers:
        yield from _of_generation(recipe)


_NOT_FLAT = ("GKD", "GOLD")
"""Trainers that inherit the options of SFT, and refuse to flatten batches."""


def _of_generation(recipe: Recipe) -> Iterator[Claim]:
    answered = PLAIN.but(arguments=_ON_POLICY.get(recipe.name, {}))
    sampled = answered.but(samples=True)
    yield Pair(sampled, sampled.but(arguments={"generation_kwargs": {"use_cache": False}}))
    for option in ("use_transformers_paged", "use_transformers_continuous_batching"):
        yield Pair(answered, answered.but(arguments={option: True}))
    # A server says how probable its answers were, by the weights that it has been sent.
    for setting in (answered, answered.but(adapter="config"), answered.but(accumulation=2)):
        if recipe.name not in _NO_SERVER:
            yield Pair(setting, setting.but(arguments={"use_vllm": True}), TRAINED)


_NO_SERVER = ("OnlineDPO", "XPO", "NashMD")
"""Trainers that ask torch which GPU they have."""

_ON_POLICY = {"GKD": {"lmbda": 1.0}, "GOLD": {"lmbda": 1.0}}
"""Options with which a trainer asks its model for answers, where its recipe does not say so."""


def logging(recipe: Recipe) -> Iterator[Claim]:
    yield Pair(PLAIN, PLAIN.but(arguments={"logging_steps": 1, "logging_first_step": True}))
    yield Averaged(PLAIN, PLAIN.but(arguments={"logging_steps": 3}))


def saving(recipe: Recipe) -> Iterator[Claim]:
    # PPO trains a policy and a value in one wrapper, which no class loads.
    for setting in (
        PLAIN,
        PLAIN.but(adapter="config"),
        PLAIN.but(adapter="model"),
        *(() if recipe.labels else (PLAIN.but(architecture="shared"),)),
        PLAIN.but(dtype="bfloat16"),
    ):
        if recipe.name != "PPO":
            yield Saved(setting.but(saves=True))


def formulas(recipe: Recipe) -> Iterator[Claim]:
    if recipe.name not in FORMULAS:
        return
    plain = Setting(by_hand=recipe.name, arguments=LOSS.get(recipe.name, {}))
    yield OfFormula(plain)
    for options in _OTHER_LOSSES.get(recipe.name, ()):
        yield OfFormula(plain.but(arguments=options))
    for architecture in BY_ROW if not recipe.labels else ():
        yield OfFormula(plain.but(architecture=architecture))


LOSS: dict[str, dict[str, object]] = {
    "GRPO": {"loss_type": "grpo"},
    "GFPO": {"loss_type": "grpo"},
    "IWOPD": {"distillation_objective": "jsd", "loss_top_k": 0},
}
"""A loss with a formula, where a release has another default."""

_OTHER_LOSSES: dict[str, Sequence[dict[str, object]]] = {
    "DPO": ({"loss_type": "hinge"}, {"loss_type": "ipo"}),
    "GRPO": ({"loss_type": "bnpo"}, {"loss_type": "dr_grpo"}, {"loss_type": "dapo"}),
    "KTO": ({"loss_type": "apo_zero_unpaired"}, {"desirable_weight": 2.0}),
    "Reward": ({"center_rewards_coefficient": 0.1},),
    "CPO": ({"loss_type": "hinge"}, {"loss_type": "ipo"}, {"loss_type": "simpo"}, {"cpo_alpha": 0.0}),
    "TPO": ({"loss_type": "tpo-l"}, {"tpo_alpha": 0.5}),
    "GKD": ({"beta": 0.0}, {"beta": 1.0}, {"beta": 0.2}, {"lmbda": 1.0}),
    "GOLD": ({"beta": 0.0}, {"beta": 1.0}, {"lmbda": 1.0}),
    "Distillation": ({"beta": 0.0}, {"beta": 0.5}, {"lmbda": 0.0}),
    "IWOPD": ({"beta": 0.0}, {"beta": 0.5}, {"lmbda": 0.0}),
}
