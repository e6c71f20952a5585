"""The proof: one step of SFTTrainer with a RecurrentGemma whose soft cap bites.

What is right is what the same model says of the same batch by itself.
"""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {
    "lora": "the model has no adapter, and where it has one the head is the same",
    "compiled": "compiled, RecurrentGemma has other logits than eager, without TRL too",
}
CAP = 0.05


def train() -> tiny.TrainingResult:
    import torch
    import trl.trainer.sft_trainer as leaf

    head = getattr(leaf, "_patch_chunked_ce_lm_head", None)
    if head is None and not hasattr(leaf, "add_fused_lm_head"):
        return tiny.TrainingResult(absent("this release has no head of its own"))
    if head is not None and "past_key_values=outputs" in inspect.getsource(inspect.unwrap(head)):
        return tiny.TrainingResult(absent("the first step of this model fails for another reason"))
    with tempfile.TemporaryDirectory() as folder:
        model, alone = (_recurrent_gemma(folder) for _ in range(2))
        loss, gradients, batch = _step(model)
    labels = batch.pop("labels")[:, 1:]
    # What the sum is divided by, where transformers says so.
    tokens = batch.pop("num_items_in_batch", None)
    tokens = int((labels != -100).sum() if tokens is None else tokens)
    with torch.no_grad():
        capped = alone(**batch, use_cache=False).logits[:, :-1].float()
        hidden = alone.model(**batch, use_cache=False).last_hidden_state[:, :-1]
        plain = alone.lm_head(hidden).float()
    right, wrong = (
        float(torch.nn.functional.cross_entropy(its.flatten(0, 1), labels.flatten(), reduction="sum")) / tokens
        for its in (capped, plain)
    )
    return tiny.TrainingResult(judge(loss, right=right, wrong=wrong), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """A model without a soft cap."""
    with tempfile.TemporaryDirectory() as folder:
        loss, gradients, _ = _step(tiny.llama(folder, seed=0))
    return tiny.TrainingResult(absent("the model has no soft cap"), loss, gradients)


def _recurrent_gemma(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        lru_width=16,
        attention_window_size=32,
        logits_soft_cap=CAP,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    path = Path(folder, "recurrent-gemma")
    if not path.exists():
        RecurrentGemmaForCausalLM(config).save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path)


def _step(model: Any) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Loss, gradients and batch of the first step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []
    batches: list[dict[str, Any]] = []

    class Measured(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            batches.append({key: inputs[key].clone() for key in ("input_ids", "attention_mask", "labels")})
            batches[-1].update({key: kwargs[key] for key in ("num_items_in_batch",) if key in kwargs})
            result = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    trainer = tiny.trainer(
        Measured,
        model=model,
        args=tiny.config(SFTConfig, max_length=16, loss_type="chunked_nll"),
        train_dataset=Dataset.from_list(rows),
        tokenizer=tiny.tokenizer(),
    )
    seen = tiny.FirstStep(trainer.model)
    trainer.train()
    return losses[0], seen.gradients, batches[0]
