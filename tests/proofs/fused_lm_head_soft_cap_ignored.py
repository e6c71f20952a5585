"""Train one step with SFTTrainer and a RecurrentGemma whose soft cap is small enough to change the loss.

The expected loss is that of the same model on the same batch without TRL.
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
    from trl.trainer import sft_trainer

    head = getattr(sft_trainer, "_patch_chunked_ce_lm_head", None)
    if head is None and not hasattr(sft_trainer, "add_fused_lm_head"):
        return tiny.TrainingResult(absent("this release has no head of its own"))
    if head is not None and "past_key_values=outputs" in inspect.getsource(inspect.unwrap(head)):
        return tiny.TrainingResult(absent("the first step of this model fails for another reason"))
    with tempfile.TemporaryDirectory() as folder:
        model, untrained = (_recurrent_gemma(folder) for _ in range(2))
        loss, gradients, batch = _step(model)
    labels = batch.pop("labels")[:, 1:]
    # Where transformers passes this number, the sum of the losses is divided by it.
    tokens = batch.pop("num_items_in_batch", None)
    tokens = int((labels != -100).sum() if tokens is None else tokens)
    with torch.no_grad():
        capped = untrained(**batch, use_cache=False).logits[:, :-1].float()
        hidden = untrained.model(**batch, use_cache=False).last_hidden_state[:, :-1]
        uncapped = untrained.lm_head(hidden).float()
    right, wrong = (
        float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")) / tokens
        for logits in (capped, uncapped)
    )
    return tiny.TrainingResult(judge(loss, right=right, wrong=wrong), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a model without a soft cap."""
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
    """Return loss, gradients and batch of the first step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    trainer = tiny.trainer(
        tiny.measured(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, max_length=16, loss_type="chunked_nll"),
        train_dataset=Dataset.from_list(rows),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    batch = {key: trainer.batches[0][key] for key in ("input_ids", "attention_mask", "labels")}
    batch.update({key: value for key, value in trainer.keywords[0].items() if key == "num_items_in_batch"})
    return trainer.losses[0], trainer.step.gradients, batch
