"""The relations: two runs, or two ways to the same number, that must agree."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any

from . import more_of_forms, more_of_models, more_of_steps, of_forms, of_models, of_steps
from .architectures import ARCHITECTURES
from .changes import NEEDS, change_of
from .claims import Claim
from .materials import GROUP
from .recipes import Recipe, parameters
from .setting import Setting

Claims = Callable[[Recipe], Iterator[Claim]]


@dataclass(frozen=True)
class Relation:
    """What must hold of each trainer, why, and the claims that show it."""

    name: str
    why: str
    claims: Claims


def both(one: Claims, other: Claims) -> Claims:
    """Return what gives the claims of two functions."""
    return lambda recipe: chain(one(recipe), other(recipe))


RELATIONS = {
    relation.name: relation
    for relation in (
        Relation(
            "accumulation",
            "A step is over the same rows, however many are computed at a time.",
            both(of_steps.accumulation, more_of_steps.accumulation),
        ),
        Relation(
            "ranks",
            "A step is over the same rows, however many processes share them.",
            both(of_steps.ranks, more_of_steps.ranks),
        ),
        Relation(
            "padding",
            "Padding is no part of a text. Where it stands and how much there is says nothing.",
            both(of_steps.padding, more_of_steps.padding),
        ),
        Relation("order", "A loss is a sum over the rows of a batch, and a sum has no order.", of_steps.order),
        Relation(
            "resume",
            "A run that is saved and goes on is the run that was never stopped.",
            both(of_steps.resume, more_of_steps.resume),
        ),
        Relation(
            "evaluation",
            "To look at a model does not change it, and shows the same in any batch size.",
            of_steps.evaluation,
        ),
        Relation(
            "adapters",
            "A new adapter is the base, and peft_config makes what get_peft_model makes.",
            both(of_models.adapters, more_of_models.adapters),
        ),
        Relation(
            "limits",
            "At its neutral value an option changes nothing, and at equal lengths means agree.",
            both(of_models.limits, more_of_models.limits),
        ),
        Relation(
            "options",
            "Packing, workers and caches say how a step is computed, not what it is.",
            both(of_forms.options, more_of_forms.options),
        ),
        Relation(
            "formats",
            "A text, a conversation and its tokens are the same rows.",
            both(of_forms.formats, more_of_forms.formats),
        ),
        Relation(
            "models",
            "A model is the same by its path as an object, and whatever its head is like.",
            both(of_forms.models, more_of_models.models),
        ),
        Relation(
            "effects", "A trainer changes the model's weights, and nothing else that it was given.", of_models.effects
        ),
        Relation("logging", "A log shows the steps since the last one.", of_forms.logging),
        Relation("saving", "The model on disk is the model in memory.", of_forms.saving),
        Relation(
            "formulas",
            "A loss has a formula, which anybody can compute.",
            both(of_forms.formulas, more_of_forms.formulas),
        ),
    )
}


def claims_of(name: str, recipe: Recipe) -> Iterator[Claim]:
    """Give the claims of a relation about a trainer that the installed TRL has the options for."""
    return (claim for claim in RELATIONS[name].claims(recipe) if is_here(claim, recipe))


def is_here(claim: Claim, recipe: Recipe) -> bool:
    """Return whether the installed TRL has the options that a claim is about. Raises ``CannotBeAskedError``."""
    return all(_exists(setting, recipe) for setting in claim.settings)


def _exists(setting: Setting, recipe: Recipe) -> bool:
    trainer_class, config_class = recipe.classes()
    if setting.architecture and not hasattr(
        import_module("transformers"), f"{ARCHITECTURES[setting.architecture][0]}ForCausalLM"
    ):
        return False
    needed = setting.callback or NEEDS.get(change_of(setting))
    if needed and not hasattr(import_module("trl"), needed):
        return False
    if setting.data == "stream" and not _takes_streams(trainer_class):
        return False
    if setting.form.startswith("conversation") and "chat_template" not in inspect.getsource(trainer_class):
        return False
    if setting.images and "images" not in inspect.getsource(sys.modules[trainer_class.__module__]):
        return False
    if setting.adapter == "config" and "peft_config" not in parameters(trainer_class):
        return False
    if setting.arguments.get("use_vllm") and not _has_client():
        return False
    options = {field.name for field in dataclasses.fields(config_class)}
    if recipe.generates and "steps_per_generation" not in options and setting.batch_size * setting.ranks % GROUP:
        # Each batch of early releases has whole groups.
        return False
    return setting.arguments.keys() <= options


def _has_client() -> bool:
    """Return whether TRL has a client of a vLLM server, which some trainers import only when they are made."""
    for name in ("trl.generation.vllm_generation", "trl.extras.vllm_client"):
        with contextlib.suppress(ImportError):
            import_module(name)
            return True
    return False


def _takes_streams(trainer_class: type) -> bool:
    """Return whether a trainer says that it trains on a dataset without a length."""
    classes: tuple[Any, ...] = trainer_class.__mro__
    found = (inspect.signature(base.__init__).parameters.get("train_dataset") for base in classes)
    return "IterableDataset" in str(next(parameter.annotation for parameter in found if parameter is not None))
