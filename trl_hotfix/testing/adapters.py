"""Models for adapters, and LoRA beneath a checkpoint: which of its matrices get a gradient."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..authoring import judge
from ..model import Outcome


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


def judge_adapters(new_model: Callable[..., Any]) -> Outcome:
    """Compare the gradients of trainers' adapters with those of a trainer without checkpoints.

    ``new_model(options, checkpointing=True, adapter=True)`` returns the model of a new trainer, ``options`` being its
    ``gradient_checkpointing_kwargs``. Where these are right already, the output of the embeddings is to be left alone.
    """
    untouched = {
        "without checkpoints": new_model(None, checkpointing=False),
        "not reentrant": new_model({"use_reentrant": False}),
        "full fine-tuning": new_model({"use_reentrant": True}, adapter=False),
    }
    if touched := [name for name, model in untouched.items() if _hooks(model)]:
        raise AssertionError(f"the embeddings have a hook: {touched}")
    expected = lora_gradients(untouched["without checkpoints"], None)
    outcomes = []
    for options in ({"use_reentrant": True}, {}, None):
        model = new_model(options)
        gradients = lora_gradients(model, options or {"use_reentrant": True})
        outcomes.append(judge_gradients(gradients))
        if any(gradient.any() and not gradient.allclose(expected[name]) for name, gradient in gradients.items()):
            raise AssertionError(f"with {options} the gradients are {gradients}, and without checkpoints {expected}")
        if len(_hooks(model)) > 1:
            raise AssertionError(f"with {options} the embeddings have several hooks")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers are not all alike: {outcomes}")
    return outcomes[0]


def judge_gradients(gradients: dict[str, Any]) -> Outcome:
    """Judge how many of the four matrices of ``base_and_lora`` have a gradient: all, or those behind the decoder."""
    reached = sum(bool(gradient.any()) for gradient in gradients.values())
    return judge(reached, right=4, wrong=2, adapters=len(gradients))


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


def _hooks(model: Any) -> Any:
    return model.get_input_embeddings()._forward_hooks
