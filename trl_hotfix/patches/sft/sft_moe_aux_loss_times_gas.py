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

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, argument, copies_of_the_loss, judge, micro_batches, shadowed
from ...model import Outcome, Verdict
from ...testing import SftMoeStep, absent_if_reexported, recorded_warnings

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""The names of the coefficient in transformers: in nearly all models, in JetMoE, and in DBRX."""

_first_warning = Once()


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
        if _has_aux_loss(instance) and _first_warning(instance):
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
"""Where the owners of a coefficient can be in a model, and of which class they were there."""


def _owners_in(model: Any) -> list[Any]:
    """Return the modules of ``model`` that have a coefficient, and of those with the same config the outermost.

    All modules are looked at once for each model, which can have tens of thousands, and again if there is another
    module in one of the places.
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
    """Check by derivatives that micro-batches and ranks change the weight of the auxiliary loss as they should."""
    if reexported := absent_if_reexported(module, module.SFTTrainer.compute_loss):
        return reexported
    coefficient = 0.5
    step = SftMoeStep(module, coefficient)
    trainer = step.trainer
    cross_entropy, once = step.weights()

    def count(*, micro_batches: int = 4, items: int | None = 12, model: Any = None, **attributes: Any) -> float:
        """Return how often the auxiliary loss is in the loss of a micro-batch."""
        with ExitStack() as stack:
            for name, value in {"current_gradient_accumulation_steps": micro_batches, **attributes}.items():
                owners = (trainer, trainer.accelerator, trainer.args)
                stack.enter_context(shadowed(next(owner for owner in owners if name in vars(owner)), name, value))
            return step.weights(items=items, model=model)[1] / once

    outcome = judge(count(), right=0.25, wrong=1.0)
    if outcome.verdict is Verdict.REPRODUCED:
        return outcome
    counts = {
        "four micro-batches again": (count(), 1 / 4),
        "one micro-batch": (count(micro_batches=1), 1),
        "two ranks, each with its own count": (count(num_processes=2, average_tokens_across_devices=False), 1 / 4),
        "no count of items": (count(items=None), 1),
    }
    # 0.23.0 adds the term a second time, which ranks do not multiply: `sft-aux-loss-counted-twice` repairs that.
    if math.isclose(once, coefficient):
        counts["two ranks"] = count(num_processes=2), 1 / 4
        counts["two ranks and one micro-batch"] = count(num_processes=2, micro_batches=1), 1
    # From 1.15.0 on TRL adds the term itself, in other runs too.
    names_in_trl = inspect.unwrap(module.SFTTrainer.compute_loss).__code__.co_names
    if "current_gradient_accumulation_steps" not in names_in_trl:
        counts["sequence parallelism"] = count(parallelism_config=SimpleNamespace(sp_backend="", sp_enabled=True)), 1
        counts["a loss that Trainer divides"] = count(model_accepts_loss_kwargs=False), 1
        step.model.eval()
        counts["evaluation"] = count(), 1
        step.model.train()
        with shadowed(trainer, "aux_loss_enabled", False):
            for place, model in _models_with_coefficient(step):
                shares = count(model=model) / count(model=model, micro_batches=1)
                counts[f"the coefficient in {place}"] = shares, 1 / 4
        for routed in (True, False):
            # 0.23.0 has the coefficient under this name; `sft-aux-loss-counted-twice` may have turned the term off.
            enabled = (None,) if "aux_loss_enabled" not in names_in_trl else (True, False)
            for on in () if routed is False and "aux_loss_coef" in names_in_trl else enabled:
                right = int(routed or on is True)
                counts[f"warnings with aux_loss_enabled={on}, {routed=}"] = _warnings(module, on, routed), right
    wrong = {name: value for name, (value, right) in counts.items() if not math.isclose(value, right, rel_tol=1e-5)}
    if wrong:
        raise AssertionError(f"the auxiliary loss is counted wrongly: {wrong}")
    with shadowed(trainer, "current_gradient_accumulation_steps", 4):
        accumulated = step.weights()[0]
    if accumulated != cross_entropy or (step.model.router_aux_loss_coef, trainer.aux_loss_coef) != (0.5, 0.5):
        raise AssertionError(f"the cross-entropy has the weight {accumulated}, or a coefficient is another one")
    return outcome


def _warnings(module: ModuleType, enabled: bool | None, routed: bool) -> int:
    """Return how many warnings two micro-batches give if the model's coefficient is not found.

    The trainer has the auxiliary loss if it is ``enabled``, and the model's config says so if it is ``routed``.
    """
    step = SftMoeStep(module, 0.5, current_gradient_accumulation_steps=4, aux_loss_enabled=enabled)
    if enabled is None:  # an early release, which has no such attribute
        del step.trainer.aux_loss_enabled
    del step.model.router_aux_loss_coef
    if routed:
        step.model.config = SimpleNamespace(output_router_logits=True)
    step.coefficient = lambda: 0.5
    with recorded_warnings() as messages:
        weights = [step.weights() for _ in range(2)]
    if weights[0] != weights[1] or not all("over 4 micro-batches" in message for message in messages):
        raise AssertionError(f"without a coefficient the weights are {weights}, the warnings {messages}")
    return len(messages)


def _models_with_coefficient(step: SftMoeStep) -> Iterator[tuple[str, Any]]:
    """Have the model read its coefficient in several places, one after the other, and give a model that has it there.

    What was found in a model must be found again after it has changed.
    """
    import torch

    model, trainer = step.model, step.trainer

    class Config(SimpleNamespace):
        def get_text_config(self) -> Any:
            return getattr(self, "text", self)

    def wrapped(inner: Any) -> Any:
        outer = torch.nn.Module()
        outer.layers = torch.nn.ModuleList([inner])
        outer.forward = model.forward
        return outer

    def read(owner: Any, name: str) -> Any:
        step.coefficient = lambda: getattr(owner, name)
        return model

    yield "a wrapped model", wrapped(model)
    model.config = SimpleNamespace(router_aux_loss_coef=0.25)
    yield "the config", read(model.config, "router_aux_loss_coef")
    model.config = Config(moe_loss_weight=0.25)
    yield "the config of a text model", read(model.config, "moe_loss_weight")
    model.config = Config(text=SimpleNamespace(aux_loss_coef=0.25))
    yield "the config of the text in a new config", read(model.config.text, "aux_loss_coef")
    outer, inner = wrapped(torch.nn.Identity()), torch.nn.Identity()
    inner.config = SimpleNamespace()
    outer.layers[0], inner.moe_loss_weight = inner, 0.25
    read(inner, "moe_loss_weight")
    yield "a layer", outer
    outer.layers[0] = torch.nn.Sequential(inner)
    yield "a layer of a new layer", outer
    outer.layers = torch.nn.Sequential()
    outer.layer = inner
    yield "a layer elsewhere", outer
    outer.config = inner.config = SimpleNamespace(router_aux_loss_coef=0.25)
    read(inner.config, "router_aux_loss_coef")
    yield "a config of the model and of a layer", outer
    del inner.moe_loss_weight
    yield "the config of a wrapped model", wrapped(inner)
    trainer.compute_loss_func = lambda outputs, labels, **kwargs: (
        outputs.cross_entropy + trainer.aux_loss_coef * outputs.aux_loss
    )
    yield "the trainer, for a loss of the user's", outer
    trainer.model_accepts_loss_kwargs = False
    yield "the trainer, for a model that takes no count", outer
    trainer.compute_loss_func, trainer.model_accepts_loss_kwargs = None, True
    del model.config
    read(model, "router_aux_loss_coef")
