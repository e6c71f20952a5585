"""More tiny models that are odd, beside those of ``architectures``, whose table gets them by name."""

from __future__ import annotations

from typing import Any

from .architectures import ARCHITECTURES

COEFFICIENT = 0.5
"""The weight of the loss of the router."""

BY_ROW = (*ARCHITECTURES, "absolute", "divided")
"""Models whose loss of a row depends on no other row."""

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # It counts positions from the padding on.
    "absolute": (
        "GPTNeo",
        {
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global"], 2]],
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "divided": ("Granite", {"logits_scaling": 4.0, "tie_word_embeddings": False}),
    "balanced": ("Mixtral", {**_EXPERTS, "router_aux_loss_coef": COEFFICIENT}),
    "unbalanced": ("Mixtral", {**_EXPERTS, "router_aux_loss_coef": 0.0}),
}
"""The name of the model in transformers and its options, by what is odd about it."""

ARCHITECTURES.update(MODELS)
