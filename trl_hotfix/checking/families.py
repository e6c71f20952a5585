"""Make a model of each family small: two layers of the same kind and shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, HEAD, LAYERS, EXPERTS = 64, 4, 16, 2, 4

DECODERS = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2"),
        *("granite", "cohere", "stablelm", "starcoder2", "smollm3", "gpt2", "gpt_neox", "gpt_neo", "gptj", "opt"),
        *("bloom", "falcon", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    }
)
ENCODERS = frozenset({"bert", "roberta", "distilbert"})
FAMILIES = DECODERS | ENCODERS
"""The values of ``model_type`` that we can make small."""

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "ffn_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), HIDDEN),
    **dict.fromkeys(("num_experts", "num_local_experts"), EXPERTS),
    "head_dim": HEAD,
    "rotary_dim": HEAD // 2,
    "query_pre_attn_scalar": HEAD,
}
"""Fields of configs, and what they are in a small one, where they are larger in the whole one."""

LARGE = 30_000_000
"""Make a model with more weights small."""


def small(config: Mapping[str, Any], vocabulary: int | None = None) -> dict[str, Any]:
    """Return the fields of a small config. Raises ``ValueError`` for a family that cannot be made small."""
    family = config.get("model_type")
    if family not in FAMILIES:
        nested = " (its text model is part of another)" if "text_config" in config else ""
        raise ValueError(f"the family {family!r} is not among those that check can make small{nested}")
    made = dict(config)
    for name, size in SIZES.items():
        value = made.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            made[name] = size
    _of_attention(config, made)
    layers = made.get("num_hidden_layers") or made.get("n_layer") or LAYERS
    if isinstance(config.get("layer_types"), list):
        kinds = list(dict.fromkeys(config["layer_types"]))
        made["layer_types"] = (kinds * layers)[:layers] if len(kinds) > 1 else kinds * layers
    if isinstance(config.get("num_experts_per_tok"), int):
        made["num_experts_per_tok"] = min(config["num_experts_per_tok"], EXPERTS // 2)
    if family == "gpt_neo":
        made["attention_types"] = [[["global", "local"], 1]]
        made.pop("attention_layers", None)
    for name in ("mlp_only_layers", "no_rope_layers", "no_rope_layer_interval"):
        if isinstance(made.get(name), list):
            made[name] = made[name][:layers] if name == "no_rope_layers" else []
    _of_positions(made)
    if vocabulary is not None:
        made["vocab_size"] = vocabulary
        # The default of a family may be a token of its whole vocabulary.
        made.setdefault("pad_token_id", None)
    made.pop("quantization_config", None)
    return made


def _of_attention(config: Mapping[str, Any], made: dict[str, Any]) -> None:
    """Keep whether heads share their keys, and a width of heads that differs from the model's."""
    heads = config.get("num_attention_heads") or config.get("n_head")
    for name in ("num_key_value_heads", "num_kv_heads"):
        shared = config.get(name)
        if isinstance(shared, int) and isinstance(heads, int):
            made[name] = HEADS if shared == heads else 1 if shared == 1 else HEADS // 2


def _of_positions(made: dict[str, Any]) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        scaling = made.get(name)
        # Its factors are one for each pair of a head's elements.
        if isinstance(scaling, Mapping) and "long_factor" in scaling:
            kept = {key: value for key, value in scaling.items() if key in ("rope_theta", "partial_rotary_factor")}
            made[name] = {"rope_type": "default", **kept} if name == "rope_parameters" else None
            made["original_max_position_embeddings"] = made.get("max_position_embeddings")


def weights_of(config: Any) -> int:
    """Return about how many weights a model of this config has."""
    width = _first(config, "hidden_size", "n_embd", "dim")
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    inner = _first(config, "intermediate_size", "ffn_dim", "n_inner", "hidden_dim") or 4 * width
    experts = max(1, _first(config, "num_experts", "num_local_experts"))
    return int(layers * (4 * width * width + 3 * width * inner * experts) + width * _first(config, "vocab_size"))


def _first(config: Any, *names: str) -> int:
    values = (config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
