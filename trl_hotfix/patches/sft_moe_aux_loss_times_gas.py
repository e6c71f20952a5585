"""SFT multiplies the router auxiliary loss of a mixture-of-experts model by the micro-batches and by the ranks.

The cross-entropy of a micro-batch is divided by ``num_items_in_batch``, the tokens of the whole optimizer step, and so
``Trainer`` does not divide by ``gradient_accumulation_steps`` any more (transformers 4.46 and later). The model adds
``router_aux_loss_coef * aux_loss`` to it, which is a mean over the micro-batch and is divided by nothing: accumulated
over N micro-batches it weighs N times as much. With ``average_tokens_across_devices``, the default of later
transformers, ``num_items_in_batch`` counts the tokens of all ranks and ``Trainer`` multiplies the loss, with the term
in it, by their number; averaged over the ranks, the term weighs that much more again. 8 micro-batches on 8 GPUs
balance the experts 64 times as hard as the coefficient says.

TRL 1.15.0 adds the term itself, after that multiplication and divided by the micro-batches ("The MoE aux loss is a
per-micro-batch mean that DDP averages across ranks"). Here the coefficient is so much smaller for the time of the call:
on the model, in its config (TRL's chunked loss and vision-language models read it there) and on the trainer (0.23.0).
Nothing is done to the graph, so that it is all the same to DDP, FSDP, DeepSpeed and Liger, and to who adds the term.

``SFTTrainer`` has a ``compute_loss`` from 0.15.0 on. 0.12 to 0.14 inherit that of ``Trainer`` and are left as they are.
So is DeepSpeed's sequence parallelism, which has its own reduction, as in 1.15.0.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ..authoring import argument, copies_of_the_loss, judge, micro_batches, shadowed
from ..model import Outcome
from ..stubs import absent_if_reexported, sft_moe_loss

_NAMES = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""What models of transformers call the coefficient: nearly all of them, JetMoE, and DBRX."""

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def weigh_the_aux_loss_once(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``compute_loss`` with a coefficient that is divided by the micro-batches and ranks that are summed up."""
    items = argument(wrapped, args, kwargs, "num_items_in_batch")
    summed = instance.model_accepts_loss_kwargs or instance.compute_loss_func is not None
    parallelism = getattr(instance.accelerator, "parallelism_config", None)
    if items is None or not summed or not instance.model.training or getattr(parallelism, "sp_enabled", False):
        return wrapped(*args, **kwargs)
    copies = micro_batches(instance) * copies_of_the_loss(instance)
    if copies == 1:
        return wrapped(*args, **kwargs)
    found = list(_coefficients(argument(wrapped, args, kwargs, "model")))
    if not found:
        if getattr(instance, "aux_loss_enabled", False) and instance not in _warned:
            _warned.add(instance)
            logging.getLogger("trl_hotfix").warning(
                "the coefficient of the model's auxiliary loss is not found: it is added up over %d micro-batches and "
                "ranks, and not averaged. Divide the coefficient by that number yourself",
                copies,
            )
        return wrapped(*args, **kwargs)
    found += _numbers(instance)
    with ExitStack() as stack:
        for place, name in found:
            stack.enter_context(shadowed(place, name, vars(place)[name] / copies))
        return wrapped(*args, **kwargs)


def _coefficients(model: Any) -> Iterator[tuple[Any, str]]:
    """Where ``model``, wrapped as it may be, has a coefficient of its auxiliary loss: the places and their names."""
    seen = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None
        for place in (module, config, text):
            if id(place) not in seen and hasattr(place, "__dict__"):
                seen.add(id(place))
                yield from _numbers(place)


def _numbers(place: Any) -> list[tuple[Any, str]]:
    values = {name: vars(place).get(name) for name in _NAMES}
    return [(place, name) for name, value in values.items() if isinstance(value, (int, float)) and value]


def aux_loss_is_weighed_once(module: ModuleType) -> Outcome:
    """How much the loss grows with the coefficient: in one of four micro-batches a quarter of what it does alone."""
    if elsewhere := absent_if_reexported(module, module.SFTTrainer.compute_loss):
        return elsewhere

    def slope(steps: int, items: int | None = 12) -> float:
        attributes = {"current_gradient_accumulation_steps": steps, "model_accepts_loss_kwargs": True}
        losses = [sft_moe_loss(module, each, num_items_in_batch=items, **attributes) for each in (0.5, 1.0)]
        return losses[1] - losses[0]

    alone = slope(1)
    outcome = judge(slope(4), right=alone / 4, wrong=alone)
    if slope(4, None) != alone:
        raise AssertionError("without num_items_in_batch, as in an evaluation, it is divided too")
    return outcome
