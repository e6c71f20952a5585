"""What wrappers share. torch is imported inside functions only: a patch module must load without it."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from .model import Outcome, Verdict


def replaced_argument(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with the argument ``name`` of ``wrapped`` replaced, however it was passed."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.arguments[name] = value
    return bound.args, bound.kwargs


def argument(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument ``name`` of this call of ``wrapped``, however it was passed, or its default."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


@contextmanager
def shadowed(instance: Any, name: str, value: Any) -> Iterator[None]:
    """``instance.name`` is ``value`` in here, and what it was afterwards: also none of its own."""
    before = vars(instance).copy()
    setattr(instance, name, value)
    try:
        yield
    finally:
        if name in before:
            setattr(instance, name, before[name])
        else:
            delattr(instance, name)


def with_config(model: Any, config: Any) -> Any:
    """A view of a wrapped model (DeepSpeed engine, DDP) that answers ``.config`` with ``config``.

    Everything else, calls included, is the model's own, so its hooks and its gradient synchronisation run as ever.
    """
    import wrapt

    class ConfigView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        pass

    # A property of the view's class: an attribute set on a proxy would land on the model.
    ConfigView.config = property(lambda self: config)  # type: ignore[attr-defined]
    return ConfigView(model)


def with_coefficient_of_plain_model(
    wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a method that reads ``model.config.router_aux_loss_coef``, readable there if it was hidden.

    What wraps the model in training may have no ``config``, or one of its own.
    """
    model = argument(wrapped, args, kwargs, "model")
    if not trainer.aux_loss_enabled or hasattr(getattr(model, "config", None), "router_aux_loss_coef"):
        return args, kwargs
    plain = trainer.accelerator.unwrap_model(trainer.model)
    return replaced_argument(wrapped, args, kwargs, "model", with_config(model, plain.config))


def judge(measured: float, *, right: float, wrong: float, **numbers: Any) -> Outcome:
    """``fixed`` if ``measured`` is what the formula gives, ``reproduced`` if it is what the bug gives.

    Anything else is neither, and an ``AssertionError``: the self-test does not understand this release.
    """
    seen = {"measured": measured, "right": right, "wrong": wrong, **numbers}
    if math.isclose(measured, right, rel_tol=1e-5, abs_tol=1e-6):
        return Outcome(Verdict.FIXED, seen)
    if math.isclose(measured, wrong, rel_tol=1e-5, abs_tol=1e-6):
        return Outcome(Verdict.REPRODUCED, seen)
    raise AssertionError(f"measured {measured!r}: neither right ({right!r}) nor the known wrong ({wrong!r})")


def absent(why: str) -> Outcome:
    """The bug cannot show in this release, and why."""
    return Outcome(Verdict.ABSENT, {"why": why})


MASKABLE = frozenset(
    {
        *("cohere", "gemma", "glm", "glm4", "granite", "helium", "llama", "mistral", "nemotron", "olmo", "olmo2"),
        *("phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""The ``model_type`` of dense decoders with rotary positions that take an additive mask of four dimensions as it is.

Seen for each, eager and sdpa, in transformers 4.46.3 and 4.57.6 where it has the type. Mixtures of experts do too, but
their load-balancing loss wants a mask of two dimensions. What is not here is right as a padded batch.
"""


def attention_keeps_apart(model: Any) -> str:
    """How ``model``, unwrapped, can be kept from attending across the sequences of a flattened batch.

    ``flash``: it does so by itself, FlashAttention starts anew where the position ids do (transformers 4.44 and later).
    transformers has refused to load such a model where FlashAttention cannot run, so the config is what is really on.
    ``mask``: given ``block_diagonal``. ``pad``: by no means that is known here, so the batch has to be a padded one.
    """
    prompt_learning = any(
        getattr(each, "is_prompt_learning", False) for each in (getattr(model, "peft_config", None) or {}).values()
    )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    attention = str(getattr(config, "_attn_implementation", None))
    if prompt_learning:
        return "pad"
    if "flash" in attention:
        return "flash"
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    layers = set(getattr(config, "layer_types", None) or ())
    known = getattr(config, "model_type", None) in MASKABLE and not hasattr(config, "auto_map")
    return (
        "mask" if attention in ("sdpa", "eager") and known and not windows and layers <= {"full_attention"} else "pad"
    )


def sequence_numbers(position_ids: Any) -> Any:
    """To which sequence each token of a flattened batch belongs, from 0 on: ``(1, length)`` to ``(length,)``."""
    import torch

    return torch.cat([position_ids.new_zeros(1), (position_ids[0].diff() != 1).long().cumsum(0)])


def block_diagonal(position_ids: Any, dtype: Any) -> Any:
    """The additive mask ``(1, 1, length, length)`` of a flattened batch: 0 where a token may look, else ``finfo.min``.

    It may look at itself and at what is before it in its own sequence. The size is the square of the batch's tokens.
    """
    import torch

    number = sequence_numbers(position_ids)
    may_look = (number[:, None] == number[None, :]).tril()
    mask = torch.zeros(may_look.shape, dtype=dtype, device=position_ids.device)
    return mask.masked_fill(~may_look, torch.finfo(dtype).min)[None, None]


def isolated(model: Any, position_ids: Any, dtype: Any) -> Any:
    """A view of ``model``, wrapped as it may be, whose forward sees the sequences of ``position_ids`` apart.

    The mask goes into the call and not into the batch, since TRL counts tokens by the ``attention_mask`` there. A hook
    would do as well, but Dynamo does not look again whether it is still the same. The cache goes off:
    transformers treats masks and restarts of the position ids in other ways when there is one.
    """
    import wrapt

    mask = block_diagonal(position_ids, dtype)

    class IsolatedView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(*args, **{**kwargs, "attention_mask": mask, "use_cache": False})

    return IsolatedView(model)


def padded(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The padded batch of a flattened one, without position ids: ``(1, tokens)`` to ``(rows, longest)``."""
    import torch

    position_ids = batch["position_ids"]
    number = sequence_numbers(position_ids)
    lengths = torch.bincount(number)
    place = torch.arange(len(number), device=number.device) - (lengths.cumsum(0) - lengths)[number]

    def rows(values: Any, filler: int) -> Any:
        new = values.new_full((len(lengths), int(lengths.max())), filler)
        new[number, place] = values[0]
        return new

    # The sizes and sums that FlashAttention is given are those of the flattened batch.
    gone = (
        "position_ids",
        "attention_mask",
        "seq_idx",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    )
    of_tokens = {
        key: rows(value, -100 if key == "labels" else 0)
        for key, value in batch.items()
        if key not in gone and getattr(value, "shape", None) == position_ids.shape
    }
    others = {key: value for key, value in batch.items() if key not in gone and key not in of_tokens}
    return {**others, **of_tokens, "attention_mask": rows(torch.ones_like(position_ids), 0)}


def why_sequences_mix(model: Any, *, no_cache: bool = False) -> str | None:
    """Why the sequences of a flattened batch would see one another in ``model``, unwrapped, or None if they would not.

    The batch has ``position_ids`` that start anew with each sequence, and no mask. ``no_cache``: the model is called
    with ``use_cache=False``.
    """
    if getattr(model, "_is_stateful", False):
        return "the model has layers that carry a state from one sequence into the next"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "PEFT's prompt tuning ignores the position_ids that separate them"
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    attention = getattr(text, "_attn_implementation", None) or getattr(config, "_attn_implementation", None)
    if "flash" in str(attention):
        return None if _flash_attention_separates() else "this transformers is older than 4.44"
    if not _mask_separates():
        return f"the model's attention is {attention!r}, which does not separate them with this transformers and torch"
    if not no_cache and getattr(text, "use_cache", True):
        return f"the model's attention is {attention!r}, which does not separate them where the model has a cache"
    modules = (sys.modules.get(type(each).__module__) for each in model.modules())
    if not any(hasattr(each, "create_causal_mask") for each in modules):
        return "the model builds its attention mask itself"
    return None


def _flash_attention_separates() -> bool:
    """Does transformers hand the ``position_ids`` on to FlashAttention? Its pull request 31629 brought both."""
    import transformers

    return hasattr(transformers, "DataCollatorWithFlattening")


def _mask_separates() -> bool:
    """Does the mask that transformers makes for sdpa, eager or flex follow the ``position_ids``?"""
    try:
        from transformers import masking_utils
    except ImportError:  # older than 4.53
        return False
    # transformers 5 needs a newer torch anyway, and has no such constant.
    return getattr(masking_utils, "_is_torch_greater_or_equal_than_2_6", True)


def prepared_first(module: ModuleType, dataset: Any, function: Callable[..., Any], settings: Any, doing: str) -> Any:
    """``dataset.map(function)`` as this module's own ``_prepare_dataset`` would call it, before it is called.

    The main process goes first, so that the others find the result in the cache: every rank must come here, unless the
    dataset is a stream. ``settings`` is the trainer's config, and ``doing`` the progress bar's name. ``function``
    should be a nested one: ``datasets`` knows a function of a module by its name, and would take what an older release
    of the patch has made.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):  # mapped when it is read
        return dataset.map(function)
    # From 0.19 to 1.0.0rc1 this is what the dataset is read through, instead of a transform of its own.
    if hasattr(module, "remove_none_values"):
        dataset = dataset.with_transform(module.remove_none_values)
    first = getattr(module, "global_then_local_main_first", None) or module.PartialState().main_process_first
    with first():
        return dataset.map(function, num_proc=settings.dataset_num_proc, desc=doing)


def micro_batches(trainer: Any) -> int:
    """How many micro-batches the optimizer step accumulates that is under way.

    Later transformers count them, since the last step of an epoch may have fewer than ``gradient_accumulation_steps``;
    earlier ones divide by that number there too.
    """
    counted: int | None = getattr(trainer, "current_gradient_accumulation_steps", None)
    return counted or int(trainer.args.gradient_accumulation_steps)


def copies_of_the_loss(trainer: Any) -> int:
    """By how much ``Trainer.compute_loss`` multiplies a loss that is divided by the items of all ranks.

    The gradient is the mean over the ranks, and so becomes the sum. It is 1 on one device, and where each rank counts
    its own items (``average_tokens_across_devices=False``).
    """
    from transformers import Trainer

    if not getattr(trainer.args, "average_tokens_across_devices", False):
        return 1
    # Releases differ in what they look at.
    reads = Trainer.compute_loss.__code__.co_names
    if "n_gpu" in reads and trainer.args.n_gpu > 1:
        return int(trainer.args.n_gpu)
    return int(trainer.accelerator.num_processes // (trainer.get_tp_size() if "get_tp_size" in reads else 1))


def called_with(model: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A view of ``model``, wrapped as it may be, whose calls are given ``change(keyword arguments)``.

    The call is that of the whole model with all that wraps it (DDP, a DeepSpeed engine, FSDP, PEFT). A forward hook
    would do as well, but Dynamo does not look again whether it is still the same.
    """
    import wrapt

    class ChangedView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(*args, **change(kwargs))

    return ChangedView(model)


def module_of(wrapped: Callable[..., Any]) -> ModuleType:
    """The module that defines what a wrapper is given, whatever stands between: a guard, the wrapper of another."""
    found: Any = wrapped
    while not isinstance(found, FunctionType):
        found = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None) or found.func
    return sys.modules[found.__module__]
