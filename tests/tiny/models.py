"""Tiny causal language models, their LoRA adapters, and a model that claims to be quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .variants import state


def llama(folder: str, *, seed: int) -> Any:
    """Return a dense Llama of two layers."""
    return _from_disk(folder, "Llama", seed)


def mixtral(folder: str, *, seed: int, coefficient: float) -> Any:
    """Return a Mixtral of two layers and four experts, with a router auxiliary loss."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": coefficient}
    return _from_disk(folder, "Mixtral", seed, output_router_logits=True, **settings)


def gpt_neo(folder: str, *, seed: int) -> Any:
    """Return a GPT-Neo of two layers. It looks positions up in a table; its attention has the names of Llama's."""
    return _from_disk(folder, "GPTNeo", seed, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])


def opt(folder: str, *, seed: int) -> Any:
    """Return an OPT of two layers. It makes its mask without positions, or itself."""
    return _from_disk(folder, "OPT", seed, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, init_std=0.1)


def lfm2(folder: str, *, seed: int) -> Any:
    """Return an LFM2 of two layers, a convolution and an attention."""
    layers = ["conv", "full_attention"]
    return _from_disk(folder, "Lfm2", seed, layer_types=layers, block_auto_adjust_ff_dim=False, initializer_range=0.3)


def granite(folder: str, *, seed: int, scaling: float = 0.2) -> Any:
    """Return a Granite of two layers, whose logits are divided by ``scaling``."""
    return _from_disk(folder, "Granite", seed, logits_scaling=scaling)


def modernbert_decoder(folder: str, *, seed: int) -> Any:
    """Return the decoder of ModernBERT of two layers. It has a dense layer and a norm before the output embeddings."""
    import torch
    from transformers import AutoModelForCausalLM, ModernBertDecoderConfig, ModernBertDecoderForCausalLM

    torch.manual_seed(seed)
    config = ModernBertDecoderConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
        cls_token_id=2,
        sep_token_id=1,
        # Otherwise all logits are almost the same.
        initializer_range=0.5,
    )
    path = Path(folder, f"modernbert-{seed}")
    ModernBertDecoderForCausalLM(config).save_pretrained(path)
    return _in_variant(AutoModelForCausalLM.from_pretrained(path))


def qwen2_moe(folder: str, *, seed: int, coefficient: float) -> Any:
    """Return a Qwen2-MoE of two layers, four experts and a shared one, from disk, in no variant."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    path = Path(folder, f"qwen2-moe-{seed}")
    Qwen2MoeForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


def _from_disk(folder: str, kind: str, seed: int, **settings: Any) -> Any:
    """Save a model and load it. Later releases (GRPO since 0.18.0) load the reference from the policy's path."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **settings,
    )
    path = Path(folder, f"{kind.lower()}-{seed}")
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    return _in_variant(transformers.AutoModelForCausalLM.from_pretrained(path))


def _in_variant(model: Any) -> Any:
    """Add an adapter in the variant ``lora``. As PEFT makes it, an adapter adds nothing until it is trained."""
    if state.variant != "lora":
        return model
    from peft import get_peft_model

    peft_model = get_peft_model(model, lora())
    same_adapter(peft_model)
    return peft_model


def lora() -> Any:
    """Return a LoRA configuration for the attention of the tiny models."""
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def same_adapter(model: Any) -> None:
    """Set the adapter weights that PEFT draws at random to fixed values: releases draw different numbers."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.any():
            index = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.data.copy_(torch.sin(index).reshape(parameter.shape))


def set_adapters(model: Any) -> None:
    """Set every LoRA matrix to distinct values other than 0, with which half of them begin."""
    import torch

    for number, weight in enumerate(weight for name, weight in model.named_parameters() if "lora_" in name):
        weight.data = 0.5 * torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape)


def quantised(model: Any) -> Any:
    """Mark ``model`` as loaded in 8 bits. It is not quantised: the bench has no bitsandbytes.

    The mark is not 4 bits: there transformers asks bitsandbytes for the number of parameters.
    """
    model.is_loaded_in_8bit = True
    return model
