"""The facts that a model's config and its generation config tell, as dictionaries: from files, or of a live model.

``catalogue.facts`` names the facts. ``source`` is where a dictionary comes from, for the reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..catalogue.conditions import Argument, Kind

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OF_EXPERTS = re.compile(r"expert|(^|_)moe(_|$)")
_TYPES_WITH_EXPERTS = re.compile(r"moe|mixtral|dbrx|jamba|arctic|gpt_oss|llama4|switch|deepseek_v[23]|minimax")
_DEPTH = 4


def known(value: Any, source: str) -> Argument:
    """Return a fact that ``source`` tells."""
    return Argument(Kind.LITERAL, value, reason=source)


def unknown(reason: str) -> Argument:
    """Return a fact that we cannot tell."""
    return Argument(Kind.UNKNOWN, reason=reason)


def experts(config: Mapping[str, Any], source: str) -> Argument:
    """Return whether the model is a mixture of experts, by the number of experts in its config."""
    said = [(name, value) for name, value in _items(config) if _OF_EXPERTS.search(name.lower())]
    if any(name in _COUNTS and type(value) is int and value > 1 for name, value in said):
        return known(True, source)
    types = [str(value).lower() for name, value in _items(config) if value and name in ("model_type", "architectures")]
    if any(value for _, value in said) or not types or any(map(_TYPES_WITH_EXPERTS.search, types)):
        return unknown(f"{source} does not say how many experts there are")
    return known(False, source)


def scales_logits(config: Mapping[str, Any], source: str) -> Argument:
    """Return whether the model scales its logits."""
    values = [value for name, value in _items(config) if name in ("logits_scaling", "lm_head_multiplier")]
    if any(isinstance(value, (int, float)) and value != 1 for value in values):
        return known(True, source)
    # The classes of these models have a value where a file lacks it.
    model_type = str(config.get("model_type")).lower()
    if not values and re.search(r"granite|minicpm|falcon_h1|hyperclovax|None", model_type):
        return unknown(f"{source} does not say logits_scaling")
    return known(False, source)


def sampling_settings(said: Mapping[str, Any], source: str) -> Argument:
    """Return whether a generation config has sampling settings of its own. A setting that it lacks is a default."""
    for name, neutral in (("top_p", 1.0), ("repetition_penalty", 1.0), ("min_p", None), ("top_k", 50)):
        if said.get(name) not in (None, neutral):
            return known(True, source)
    # Whether a temperature counts, or a top_k of 50, depends on the defaults of TRL, which differ between releases.
    open_ended = [name for name in ("temperature", "top_k") if said.get(name) is not None]
    return unknown(f"{source} has {' and '.join(open_ended)}") if open_ended else known(False, source)


def router_loss(config: Mapping[str, Any], source: str) -> Argument:
    """Return whether the config, or a part of it, has ``output_router_logits``, whatever its value."""
    if any(name == "output_router_logits" and value is not None for name, value in _items(config)):
        return known(True, source)
    is_mixture = experts(config, source)
    return known(False, source) if is_mixture.value is False else unknown(f"{source} does not say output_router_logits")


def quantized(config: Mapping[str, Any], source: str) -> Argument:
    """Return whether the weights are stored in 4 or 8 bits of bitsandbytes."""
    settings = config.get("quantization_config")
    if not settings:
        return known(False, source)
    if not isinstance(settings, Mapping):
        return unknown(f"{source} has a quantization_config")
    return known(bool(settings.get("load_in_4bit") or settings.get("load_in_8bit")), source)


def _items(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, dict) and depth < _DEPTH:
            yield from _items(value, depth + 1)
