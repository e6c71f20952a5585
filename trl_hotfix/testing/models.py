"""Language models whose weights are a fixed function of their indices, so that no random number is drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def tiny_causal_lm(
    config: SimpleNamespace | None = None, *, vocabulary: int = 11, aux_loss: float | None = None
) -> Any:
    """Return a language model of one matrix: ``logits[b, t] = W[input_ids[b, t]]``, ``(batch, length, vocabulary)``.

    ``aux_loss`` is what a mixture-of-experts model would return as ``outputs.aux_loss``, when it is called with
    ``output_router_logits=True`` or its config has it set. With ``fused_lm_head=True`` (TRL 1.15.0 and later) it
    returns what TRL's own head does, each of shape ``(batch, length - 1)``: ``log_probs`` of ``labels`` (0 where -100),
    ``entropy``, ``mean_logits`` and ``is_top1``.
    """
    import torch

    class TinyCausalLM(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            index = torch.arange(vocabulary * vocabulary, dtype=torch.float32, device="cpu")
            self.weight = torch.nn.Parameter(torch.sin(index).reshape(vocabulary, vocabulary))
            self.config = config
            self.is_gradient_checkpointing = False

        def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> SimpleNamespace:
            logits = self.weight[input_ids]
            outputs = SimpleNamespace(logits=logits)
            if kwargs.get("fused_lm_head"):
                ignored = kwargs["labels"][:, 1:] == -100
                labels = kwargs["labels"][:, 1:].masked_fill(ignored, 0)
                log_probs = logits[:, :-1].log_softmax(-1)
                outputs.log_probs = log_probs.gather(-1, labels[..., None])[..., 0].masked_fill(ignored, 0.0)
                outputs.entropy = -(log_probs.exp() * log_probs).sum(-1)
                outputs.mean_logits = logits[:, :-1].mean(-1)
                outputs.is_top1 = log_probs.argmax(-1) == labels
            if aux_loss is not None and kwargs.get(
                "output_router_logits", getattr(config, "output_router_logits", False)
            ):
                outputs.aux_loss = torch.tensor(aux_loss, device="cpu")
            return outputs

    return TinyCausalLM()


def give_decoder(model: Any) -> None:
    """Give a ``tiny_causal_lm`` a decoder and a head, for losses that read these. Its hidden states are its logits."""
    import torch

    def decoder(input_ids: Any, **others: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=model.weight[input_ids])

    head = SimpleNamespace(weight=torch.eye(len(model.weight)), bias=None)
    model.base_model, model.get_decoder, model.get_output_embeddings = decoder, lambda: decoder, lambda: head


def tiny_moe_lm(config: SimpleNamespace, router: float = 2.0) -> Any:
    """Return ``tiny_causal_lm`` with a router of one weight: ``aux_loss`` is its square times the mean token id.

    Called with ``output_router_logits=True``, it returns the term in its outputs, and appends it to ``aux_losses``.
    """
    import torch

    model = tiny_causal_lm(config)
    model.router = torch.nn.Parameter(torch.tensor(router))
    model.aux_losses = []

    def add(model: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        if kwargs.get("output_router_logits"):
            (token_ids,) = args or (kwargs["input_ids"],)
            outputs.aux_loss = model.router.square() * token_ids.float().mean()
            model.aux_losses.append(outputs.aux_loss)

    model.register_forward_hook(add, with_kwargs=True)
    return model


def tiny_attention_model() -> Any:
    """Return a Llama of one layer with real attention, sdpa.

    It also returns what TRL's own heads do: its chunked loss, and from 1.15.0 on the fused head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    class TinyForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            outputs = super().forward(**kwargs)
            labels = kwargs.get("labels")
            if labels is not None:
                counted = labels[:, 1:] != -100
                log_probs = outputs.logits[:, :-1].log_softmax(-1)
                of_labels = log_probs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
                entropy = -(log_probs.exp() * log_probs).sum(-1)
                top1 = log_probs.argmax(-1) == labels[:, 1:]
                head_outputs = {
                    "log_probs": of_labels.masked_fill(~counted, 0.0),
                    "label_mask": counted,
                    "entropy": entropy,
                    "is_top1": top1,
                    "num_valid_tokens": counted.sum(),
                    "num_correct_tokens": (top1 & counted).sum(),
                    "entropy_sum": (entropy * counted).sum(),
                }
                for name, value in head_outputs.items():
                    setattr(outputs, name, value)
            return outputs

    model = TinyForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attn_implementation="sdpa",
        )
    )
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            index = torch.arange(parameter.numel(), dtype=torch.float32, device="cpu")
            parameter.copy_(torch.sin(index * 0.7 + number).reshape(parameter.shape))
    return model


def wrapped_like_deepspeed(model: Any) -> Any:
    """Return ``model`` as a ``DeepSpeedEngine`` shows it: ``.module`` is the model, ``.config`` DeepSpeed's dict."""
    import torch

    class Engine(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = model
            self.config = {"train_micro_batch_size_per_gpu": 1}

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return Engine()
