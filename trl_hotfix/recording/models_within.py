"""The model within what wraps it, its config, and the tokenizer of a trainer. It unwraps nothing."""

from __future__ import annotations

from typing import Any

_WRAPPERS = ("_orig_mod", "module", "pretrained_model", "policy")
"""Where torch.compile, DDP and DeepSpeed, a value head, and PPO keep the model."""
_DEEPEST = 8


def without_wrappers(model: Any) -> Any:
    """Return the model of transformers, without an adapter or what a launch has put around it."""
    for _ in range(_DEEPEST):
        inner = _within(model)
        if inner is None:
            break
        model = inner
    return model


def _within(model: Any) -> Any:
    if any(cls.__module__.startswith("peft.peft_model") for cls in type(model).__mro__):
        return model.get_base_model()
    # In `_modules` alone: other attributes may be computed, or be those of the model inside.
    modules = vars(model).get("_modules") or {}
    return next((modules[name] for name in _WRAPPERS if modules.get(name) is not None), None)


def config_of(model: Any) -> Any:
    """Return the config of the model of transformers. Raises ``AttributeError`` if it has no config."""
    return without_wrappers(model).config


def tokenizer_of(trainer: Any) -> Any:
    """Return the tokenizer of a trainer. Raises ``LookupError`` if it has no tokenizer."""
    # `tokenizer` of later trainers is a property that warns.
    processing_class = getattr(trainer, "processing_class", None) or vars(trainer).get("tokenizer")
    if processing_class is None:
        raise LookupError("no tokenizer")
    # A processor has its tokenizer within.
    return getattr(processing_class, "tokenizer", processing_class)
