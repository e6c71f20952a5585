"""Tiny models whose heads are not a plain matrix: shared, scaled or capped, and one with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("Llama", {"tie_word_embeddings": True}),
    "scaled": ("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": False}),
    # Its attention is capped too, which only the plain one does.
    "capped": (
        "Gemma2",
        {"final_logit_softcapping": 2.0, "head_dim": 8, "attn_implementation": "eager", "query_pre_attn_scalar": 8},
    ),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}),
}
"""The name of the model in transformers and its options, by what is odd about it."""


def model_of(architecture: str, like: Any, folder: Path) -> Any:
    """Return a causal model from disk, with the words of another."""
    import torch
    import transformers

    name, options = ARCHITECTURES[architecture]
    path = folder / f"model-{architecture}"
    model_class = getattr(transformers, f"{name}ForCausalLM")
    implementation = {key: value for key, value in options.items() if key == "attn_implementation"}
    if not path.is_dir():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **options, "vocab_size": like.config.vocab_size})
        model_class(config).save_pretrained(path)
    return model_class.from_pretrained(path, **implementation)
