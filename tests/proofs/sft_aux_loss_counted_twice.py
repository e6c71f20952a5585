"""The proof: one step of a tiny Mixtral with the real SFTTrainer.

The expected loss is what the same model computes from the same batch without a trainer.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import judge

import tiny

COEFFICIENT = 0.5
OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        model, untrained = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
        trainer = tiny.trainer(
            tiny.measured(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, max_length=16, router_aux_loss_coef=COEFFICIENT),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    batch: dict[str, Any] = {key: trainer.batches[0][key] for key in ("input_ids", "attention_mask", "labels")}
    # transformers, where it passes one, divides the sum over the batch by this number of tokens.
    if "num_items_in_batch" in trainer.keywords[0]:
        batch["num_items_in_batch"] = trainer.keywords[0]["num_items_in_batch"]
    with torch.no_grad():
        outputs = untrained(**batch, output_router_logits=True)
    once, aux_loss = float(outputs.loss), float(outputs.aux_loss)
    twice = once + COEFFICIENT * aux_loss
    loss = trainer.losses[0]
    outcome = judge(loss, right=once, wrong=twice, coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)
