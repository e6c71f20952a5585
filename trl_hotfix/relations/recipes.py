"""How each of TRL's trainers is made for a setting, in every release: names by what the release has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from . import materials
from .making import made
from .setting import Setting

Make = Callable[[Setting, Path], Any]
"""``make(setting, folder)`` returns a trainer. ``folder`` is for its output."""


class CannotBeAskedError(Exception):
    """A trainer cannot be made or run in a setting, and says so itself. ``args`` has its reason."""


@dataclass(frozen=True)
class Recipe:
    """What a trainer is made of, and which of its options are neutral.

    ``rows`` is the kind of its dataset and ``side`` where its tokenizer pads. ``options`` are fields of its config.
    ``neutral`` are options that change nothing at this value, ``fresh`` the numbers that a first step logs with an
    adapter that adds nothing, and ``agree_on_equal_lengths`` two values of an option that agree there.
    ``variants`` are options with which it computes another loss, and ``least`` the rows that a batch must have.
    """

    name: str
    rows: str
    side: str = "right"
    second_model: str = ""
    labels: int = 0
    generates: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    neutral: tuple[tuple[str, Any], ...] = ()
    fresh: Mapping[str, float] = field(default_factory=dict)
    agree_on_equal_lengths: tuple[tuple[str, str, str], ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ()
    least: int = 1

    def classes(self) -> tuple[Any, Any]:
        """Return the trainer and its config in the installed TRL. Raises ``CannotBeAskedError`` without one."""
        for module_name in (f"trl.experimental.{self.name.lower()}", "trl"):
            with contextlib.suppress(AttributeError, ImportError):
                module = import_module(module_name)
                return getattr(module, f"{self.name}Trainer"), getattr(module, f"{self.name}Config")
        raise CannotBeAskedError(f"this TRL has no {self.name}Trainer")

    def make(self, setting: Setting, folder: Path, trainer_class: Any = None) -> Any:
        """Return a trainer, or one of a subclass that takes the same arguments."""
        own_class, config_class = self.classes()
        trainer_class = trainer_class or own_class
        policy = materials.model(folder.parent, setting, labels=self.labels)
        settings = {
            **PLAIN,
            **self.options,
            "output_dir": str(folder),
            "per_device_train_batch_size": setting.batch_size,
            "per_device_eval_batch_size": setting.eval_batch_size,
            "gradient_accumulation_steps": setting.accumulation,
            "pad_to_multiple_of": setting.width if setting.width > 1 else None,
        }
        taken = parameters(trainer_class)
        arguments: dict[str, Any] = {
            "model": policy,
            "args": config(config_class, settings, setting.arguments),
            "train_dataset": materials.rows(self.rows, setting.order),
            "processing_class" if "processing_class" in taken else "tokenizer": materials.tokenizer(setting, self.side),
        }
        if self.second_model and not (setting.adapter and self.second_model == "ref_model"):
            arguments[self.second_model] = materials.model(folder.parent, setting, seed=1)
        if self.generates:
            arguments["reward_funcs"] = materials.reward
            policy.generate = materials.AnswersFromTable(equal_lengths=setting.equal_lengths)
        if setting.adapter == "config":
            arguments["peft_config"] = materials.lora(policy)
        return made(trainer_class, arguments, setting, folder.parent)


_LENGTHS = {"max_length": 64, "max_seq_length": 64, "max_prompt_length": 32}
_ONLINE = {"num_generations": materials.GROUP, "max_completion_length": 8, "max_prompt_length": 32, "temperature": 1.0}
_NEW_PAIR = {"loss": math.log(2), "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/margins": 0.0}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "SFT",
            "text",
            options={**_LENGTHS, "dataset_text_field": "text"},
            neutral=(("label_smoothing_factor", 0.0), ("max_length", 128)),
        ),
        Recipe(
            "DPO",
            "pairs",
            side="left",
            second_model="ref_model",
            options=_LENGTHS,
            neutral=(("precompute_ref_log_probs", True), ("ld_alpha", 1.0), ("label_smoothing", 0.0)),
            fresh=_NEW_PAIR,
        ),
        Recipe(
            "KTO",
            "labelled",
            side="left",
            second_model="ref_model",
            options=_LENGTHS,
            neutral=(("precompute_ref_log_probs", True), ("desirable_weight", 1.0)),
            fresh={"loss": 0.5, "kl": 0.0},
            least=2,
        ),
        Recipe("Reward", "pairs", labels=1, options=_LENGTHS, neutral=(("center_rewards_coefficient", 0.0),)),
        Recipe(
            "GRPO",
            "prompts",
            side="left",
            generates=True,
            options={**_ONLINE, "beta": 0.1},
            neutral=(("top_p", 1.0), ("reward_weights", [1.0]), ("epsilon", 0.3), ("num_iterations", 1)),
            fresh={"kl": 0.0},
            agree_on_equal_lengths=(
                ("loss_type", "grpo", "bnpo"),
                ("loss_type", "grpo", "dapo"),
                ("importance_sampling_level", "token", "sequence"),
            ),
        ),
        Recipe(
            "RLOO",
            "prompts",
            side="left",
            generates=True,
            options={**_ONLINE, "beta": 0.1},
            neutral=(("top_p", 1.0), ("reward_weights", [1.0]), ("num_iterations", 1)),
            fresh={"kl": 0.0},
        ),
        Recipe("CPO", "pairs", side="left", options=_LENGTHS, neutral=(("label_smoothing", 0.0),)),
        Recipe("ORPO", "pairs", side="left", options=_LENGTHS),
        Recipe("BCO", "labelled", side="left", second_model="ref_model", options=_LENGTHS),
        Recipe("PRM", "steps", labels=2, options=_LENGTHS),
        Recipe("GKD", "messages", second_model="teacher_model", options={**_LENGTHS, "lmbda": 0.0}),
    )
}

PLAIN = {
    "max_steps": 3,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def recipe_of(trainer_class: Any) -> Recipe:
    """Return the recipe of the TRL trainer that a class inherits from. Raises ``CannotBeAskedError``."""
    for base in trainer_class.__mro__:
        recipe = RECIPES.get(base.__name__.removesuffix("Trainer"))
        if recipe is not None and base.__module__.partition(".")[0] == "trl":
            return recipe
    known = ", ".join(f"{name}Trainer" for name in RECIPES)
    raise CannotBeAskedError(f"{trainer_class.__name__} inherits from none of {known}; give a recipe")


def of_the_user(found: Any, folder: Path, *, is_recipe: bool) -> tuple[Recipe, Make]:
    """Return the recipe of a user's trainer, and what makes it: his own recipe, or ours for his subclass.

    A recipe is called once, to see which trainer it makes.
    """
    if is_recipe:
        return recipe_of(type(found(Setting(), folder))), found
    recipe = recipe_of(found)
    return recipe, functools.partial(recipe.make, trainer_class=found)


def config(config_class: type, settings: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    """Return a config. Settings for which it has no field are left out; what is ``asked`` must have one."""
    fields = {each.name for each in dataclasses.fields(config_class)}
    unknown = sorted(asked.keys() - fields)
    if unknown:
        raise CannotBeAskedError(f"{config_class.__name__} has no {', '.join(unknown)}")
    return config_class(**{name: value for name, value in {**settings, **asked}.items() if name in fields})


def parameters(trainer_class: type) -> set[str]:
    """Return what the constructor takes. A class that only passes everything on has the arguments of its base."""
    classes: tuple[Any, ...] = trainer_class.__mro__
    names_by_class = (set(inspect.signature(base.__init__).parameters) for base in classes)
    return next(names for names in names_by_class if names - {"self", "args", "kwargs"})
