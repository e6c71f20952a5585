"""What the cases share: configs, models with heads that every kernel takes, one measured step of SFT."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import tiny
from tiny import flash

LENGTHS = (37, 64, 21, 50, 9, 60, 33, 64)
"""Tokens of the sequences of a batch, of different lengths."""


class CannotRun(Exception):
    """Why a case cannot run on this machine."""


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise CannotRun(f"{package} does not install here")


def config(config_class: type, device: str, dtype: str = "float32", **settings: Any) -> Any:
    """Return a config that trains on ``device`` in ``dtype``."""
    of_device: dict[str, Any] = {
        "use_cpu": device == "cpu",
        "bf16": dtype == "bfloat16",
        "tf32": False if device == "cuda" else None,
    }
    return tiny.config(config_class, **{**of_device, **settings})


def llama(folder: str, attention: str, dtype: str, *, seed: int = 0, **sizes: Any) -> Any:
    """Return a Llama with heads of 64 dimensions, which every kernel takes, in ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    path = Path(folder, f"wide-{seed}")
    if not path.exists():
        torch.manual_seed(seed)
        usual: dict[str, Any] = {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
        }
        usual |= {"vocab_size": 64, "max_position_embeddings": 32768, "pad_token_id": 0, "bos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(**{**usual, "eos_token_id": 1, "initializer_range": 0.15, **sizes}))
        model.save_pretrained(path)
    if attention == flash.FLASH_ATTENTION_2:
        need("flash_attn")
    is_flash = attention == "flash"
    model = AutoModelForCausalLM.from_pretrained(
        path, torch_dtype=getattr(torch, dtype), attn_implementation="eager" if is_flash else attention
    )
    if is_flash:
        use_kernel(dtype)
        flash.use(model, flash.FLASH_ATTENTION_2)
    return model


def use_kernel(dtype: str) -> str:
    """Put FlashAttention beneath the models: flash-attn, or torch's own; on a CPU what they compute."""
    import torch

    if not torch.cuda.is_available():
        return "reference"
    if dtype == "float32":
        raise CannotRun("FlashAttention has no float32")
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        flash.kernel[:] = [flash_attn_varlen_func]
        return "flash-attn"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        raise CannotRun(f"neither flash-attn nor torch's varlen attention is here (torch {torch.__version__})")
    flash.kernel[:] = [torch_varlen]
    return "torch varlen"


def torch_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **kwargs: Any,
) -> Any:
    """Call torch's varlen attention with the arguments of flash-attn's."""
    from torch.nn.attention.varlen import varlen_attn

    left, right = window_size
    # torch 2.11 does not know the argument.
    grouped = {} if q.shape[1] == k.shape[1] else {"enable_gqa": True}
    return varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window_size=(left, 0 if causal else right),
        **grouped,
    )


def rows(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return the token ids of sequences, no two of which are equal."""
    return [[3 + (7 * row + 3 * place + place * place) % 60 for place in range(n)] for row, n in enumerate(lengths)]


def sft(folder: str, device: str, model: Any, dtype: str, **settings: Any) -> dict[str, Any]:
    """Train one step on all rows. Return the loss and the gradients as sums over tokens."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_list([{"input_ids": row} for row in rows(LENGTHS)])
    packing = settings.get("packing", False)
    usual: dict[str, Any] = {"per_device_train_batch_size": len(LENGTHS), "learning_rate": 0.0}
    # 1.16.0 wants to be told that it need not cut the rows of a flattened batch.
    usual |= {"max_length": None if settings.get("padding_free") and not packing else max(LENGTHS)}
    trainer = tiny.trainer(
        tiny.measured(SFTTrainer),
        model=model,
        args=config(SFTConfig, device, dtype, **{**usual, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    labels = trainer.batches[0]["labels"]
    tokens = int(trainer.keywords[0].get("num_items_in_batch") or 0) or int((labels[:, 1:] != -100).sum())
    return {
        "tokens": tokens,
        "loss": trainer.losses[0] * tokens,
        "gradients": {name: value.double().cpu() * tokens for name, value in trainer.step.gradients.items()},
        "rows": len(labels),
    }


def compared(measured: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference of the losses, and that of all gradients, as one vector each."""
    pairs = [(value, expected["gradients"][name]) for name, value in measured["gradients"].items()]
    apart = math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))
    size = math.sqrt(sum(float(other.square().sum()) for _, other in pairs))
    return {
        "loss": abs(measured["loss"] - expected["loss"]) / abs(expected["loss"]),
        "gradient": apart / size,
        "rows": measured["rows"],
    }
