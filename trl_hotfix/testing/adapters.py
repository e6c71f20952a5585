"""Models for adapters, and LoRA beneath a checkpoint, with the gradients of its matrices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def base_and_lora() -> tuple[Any, Any]:
    """Return a Llama of one layer, and LoRA before and behind its output, of four matrices."""
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    return model, LoraConfig(r=1, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")


def base_for_adapters() -> Any:
    """Return a model that is never called, whose modules have names of Llama's.

    It is made for its adapters: with them a Llama of one layer takes three times as long.
    """
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    class Base(PreTrainedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            # PEFT asks for it a dozen times for each adapter.
            self.config.to_dict = lambda: {"model_type": "custom"}
            self.generation_config = SimpleNamespace(eos_token_id=1)
            self.embed_tokens, self.self_attn = torch.nn.Embedding(8, 4), torch.nn.Module()
            for name in ("q_proj", "k_proj", "v_proj"):
                self.self_attn.add_module(name, torch.nn.Linear(4, 4, bias=False))
            self.down_proj = torch.nn.Linear(4, 4, bias=False)

    return Base()


def lora_gradients(model: Any, checkpointing: dict[str, Any] | None) -> dict[str, Any]:
    """Return the gradients of the LoRA matrices, zeros for those that get none, of a model with fixed weights."""
    import torch

    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    model.train()
    for number, weight in enumerate(model.parameters()):
        # LoRA starts one matrix of each pair at 0, which would give the other matrix no gradient either.
        weight.data = torch.sin(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
        if "lora_" in name
    }
