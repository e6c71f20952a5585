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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ..authoring import argument, copies_of_the_loss, judge, micro_batches, shadowed
from ..model import Outcome
from ..testing import absent_if_reexported, sft_moe_loss

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""The names of the coefficient in transformers: in nearly all models, in JetMoE, and in DBRX."""

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def weigh_the_aux_loss_once(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``compute_loss`` with a coefficient divided by the micro-batches and ranks whose losses are added up."""
    items = argument(wrapped, args, kwargs, "num_items_in_batch")
    summed = instance.model_accepts_loss_kwargs or instance.compute_loss_func is not None
    parallelism = getattr(instance.accelerator, "parallelism_config", None)
    if items is None or not summed or not instance.model.training or getattr(parallelism, "sp_enabled", False):
        return wrapped(*args, **kwargs)
    copies = micro_batches(instance) * copies_of_the_loss(instance)
    if copies == 1:
        return wrapped(*args, **kwargs)
    coefficients = list(_coefficients_of_model(argument(wrapped, args, kwargs, "model")))
    if not coefficients:
        if getattr(instance, "aux_loss_enabled", False) and instance not in _warned:
            _warned.add(instance)
            logging.getLogger("trl_hotfix").warning(
                "the coefficient of the model's auxiliary loss is not found: it is added up over %d micro-batches and "
                "ranks, and not averaged. Divide the coefficient by that number yourself",
                copies,
            )
        return wrapped(*args, **kwargs)
    coefficients += _coefficients_of(instance)
    with ExitStack() as stack:
        for owner, name in coefficients:
            stack.enter_context(shadowed(owner, name, vars(owner)[name] / copies))
        return wrapped(*args, **kwargs)


def _coefficients_of_model(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield each object in ``model``, which may be wrapped, that has a coefficient, and the name of the attribute."""
    visited = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None
        for owner in (module, config, text):
            if id(owner) not in visited and hasattr(owner, "__dict__"):
                visited.add(id(owner))
                yield from _coefficients_of(owner)


def _coefficients_of(owner: Any) -> list[tuple[Any, str]]:
    values = {name: vars(owner).get(name) for name in _COEFFICIENTS}
    return [(owner, name) for name, value in values.items() if isinstance(value, (int, float)) and value]


def aux_loss_is_weighed_once(module: ModuleType) -> Outcome:
    """Check that with four micro-batches the loss grows a quarter as fast with the coefficient as with one."""
    if reexported := absent_if_reexported(module, module.SFTTrainer.compute_loss):
        return reexported

    def slope(steps: int, items: int | None = 12) -> float:
        attributes = {"current_gradient_accumulation_steps": steps, "model_accepts_loss_kwargs": True}
        low, high = (sft_moe_loss(module, value, num_items_in_batch=items, **attributes) for value in (0.5, 1.0))
        return high - low

    single = slope(1)
    outcome = judge(slope(4), right=single / 4, wrong=single)
    if slope(4, None) != single:
        raise AssertionError("without num_items_in_batch, as in an evaluation, it is divided too")
    return outcome
