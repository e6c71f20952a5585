"""The proof: one step of a tiny Mixtral with the real SFTTrainer.

What is right is what the same model says of the same batch by itself.
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

    losses: list[float] = []
    batches: list[dict[str, Any]] = []

    class Measured(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            batches.append({key: inputs[key].clone() for key in ("input_ids", "attention_mask", "labels")})
            # The number of tokens that the sum over the batch is divided by, where transformers gives one.
            batches[-1].update({key: kwargs[key] for key in ("num_items_in_batch",) if key in kwargs})
            result = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        model, alone = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        seen = tiny.FirstStep(model)
        rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
        trainer = tiny.trainer(
            Measured,
            model=model,
            args=tiny.config(SFTConfig, max_length=16, router_aux_loss_coef=COEFFICIENT),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    with torch.no_grad():
        said = alone(**batches[0], output_router_logits=True)
    once, aux_loss = float(said.loss), float(said.aux_loss)
    twice = once + COEFFICIENT * aux_loss
    outcome = judge(losses[0], right=once, wrong=twice, coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.TrainingResult(outcome, losses[0], seen.gradients)
