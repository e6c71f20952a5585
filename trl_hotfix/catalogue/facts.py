"""The facts of a model's files and of a launch that decide what no script says: ``facts`` of ``hits``.

``depends`` says it for a reader, and ``facts`` for a program: conditions, in the language of ``when``, that hold
together if, and only if, what ``depends`` says is so.
"""

from __future__ import annotations

from collections.abc import Mapping

FACTS: Mapping[str, str] = {
    "experts": "the model is a mixture of experts: true or false",
    "output_router_logits": "output_router_logits of the model's config: true or false",
    "router_aux_loss_coef": "router_aux_loss_coef of the model's config: a number",
    "model_type": "model_type of the model's config, such as gpt2",
    "scales_logits": "the model scales its logits by logits_scaling or lm_head_multiplier: true or false",
    "labels": "the number of labels of the model's config: a number",
    "pad_is_eos": "the tokenizer's padding token is its end-of-sequence token, or it has none: true or false",
    "other_ends": "the model lists an end-of-sequence token that is not the tokenizer's: true or false",
    "sampling_settings": "the generation config has a temperature, top_p, top_k, ... of its own: true or false",
    "plain_lora": "the adapter is a LoRA of linear layers, and of nothing else: true or false",
    "distributed": "deepspeed, fsdp or ddp",
    "processes": "the number of processes: a number",
}
"""The names of the facts, with what they mean."""
