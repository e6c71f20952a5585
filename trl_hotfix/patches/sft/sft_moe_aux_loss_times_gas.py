"""SFT multiplies the router auxiliary loss of a mixture-of-experts model by the micro-batches and by the ranks.

The cross-entropy of a micro-batch is divided by ``num_items_in_batch``, the tokens of the whole optimizer step, so
``Trainer`` no longer divides by ``gradient_accumulation_steps`` (transformers 4.46 and later). The model adds
``router_aux_loss_coef * aux_loss``, which is a mean over the micro-batch, and nothing divides this term. With
``average_tokens_across_devices`` ``num_items_in_batch`` counts the tokens of all ranks, and ``Trainer`` multiplies the
loss, this term included, by their number.

TRL 1.15.0 adds the term itself, after that multiplication and divided by the micro-batches ("The MoE aux loss is a
per-micro-batch mean that DDP averages across ranks"). The wrapper divides the coefficient for the time of the call: on
the model, in its config (TRL's chunked loss and vision-language models read it there) and on the trainer (0.23.0). The
graph does not change, so DDP, FSDP, DeepSpeed and Liger need no special case, nor does it matter which code adds the
term. ``SFTTrainer`` has a ``compute_loss`` of its own from 0.15.0 on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ...authoring import Call, Once, copies_of_the_loss, judge, micro_batches, shadowed, wrapper
from ...model import Outcome
from ...testing import SftMoeStep, absent_if_reexported

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""The names of the coefficient in transformers: in nearly all models, in JetMoE, and in DBRX."""

_first_warning = Once()


@wrapper
def weigh_the_aux_loss_once(call: Call) -> Any:
    """Run ``compute_loss`` with a coefficient divided by the micro-batches and ranks whose losses are added up."""
    trainer, items = call.trainer, call["num_items_in_batch"]
    summed = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if items is None or not summed or not call.is_training or getattr(parallelism, "sp_enabled", False):
        return call()
    copies = micro_batches(trainer) * copies_of_the_loss(trainer)
    if copies == 1:
        return call()
    coefficients = list(_coefficients_of_model(call["model"]))
    if not coefficients:
        if _has_aux_loss(trainer) and _first_warning(trainer):
            logging.getLogger("trl_hotfix").warning(
                "the coefficient of the model's auxiliary loss is not found: it is added up over %d micro-batches and "
                "ranks, and not averaged. Divide the coefficient by that number yourself",
                copies,
            )
        return call()
    coefficients += _coefficients_of(trainer)
    with ExitStack() as stack:
        for owner, name in coefficients:
            stack.enter_context(shadowed(owner, name, vars(owner)[name] / copies))
        return call()


def _has_aux_loss(trainer: Any) -> bool:
    """Return whether the trainer adds the auxiliary loss or logs it, or the config has the model add it.

    Early releases have no such attribute, and ``sft-aux-loss-counted-twice`` turns it off for the time of the call.
    """
    config = getattr(trainer.model, "config", None)
    return getattr(trainer, "aux_loss_enabled", False) or getattr(config, "output_router_logits", False)


def _coefficients_of_model(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield each object in ``model``, which may be wrapped, that has a coefficient, and the name of the attribute."""
    visited = set()
    for module in _owners_in(model):
        config = vars(module).get("config")
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        for owner in (module, config, text):
            if id(owner) not in visited and hasattr(owner, "__dict__"):
                visited.add(id(owner))
                yield from _coefficients_of(owner)


_places: weakref.WeakKeyDictionary[Any, dict[str, type]] = weakref.WeakKeyDictionary()
"""Where the owners of a coefficient can be in a model, and the class that each had there."""


def _owners_in(model: Any) -> list[Any]:
    """Return the modules of ``model`` that have a coefficient, and of those with the same config the outermost.

    It looks at all modules once for each model, which can have tens of thousands, and again if there is another module
    in one of the places.
    """
    try:
        owners = {place: model.get_submodule(place) for place in _places[model]}
    except (KeyError, AttributeError):
        owners = {}
    if not owners or {place: type(owner) for place, owner in owners.items()} != _places[model]:
        owners, configs = {"": model}, set()
        for place, module in model.named_modules():
            attributes = vars(module)
            config = id(attributes.get("config"))
            if config not in configs or not attributes.keys().isdisjoint(_COEFFICIENTS):
                owners[place] = module
                configs.add(config)
        _places[model] = {place: type(owner) for place, owner in owners.items()}
    return list(owners.values())


def _coefficients_of(owner: Any) -> list[tuple[Any, str]]:
    return [(owner, name) for name in _COEFFICIENTS if vars(owner).get(name)]


def aux_loss_is_weighed_once(module: ModuleType) -> Outcome:
    """Differentiate a micro-batch's loss by the auxiliary loss: one micro-batch of four has a fourth of its weight."""
    if reexported := absent_if_reexported(module, module.SFTTrainer.compute_loss):
        return reexported
    step = SftMoeStep(module, 0.5)
    _, alone = step.weights()
    step.trainer.current_gradient_accumulation_steps = 4
    _, of_four = step.weights()
    return judge(of_four / alone, right=0.25, wrong=1.0)
