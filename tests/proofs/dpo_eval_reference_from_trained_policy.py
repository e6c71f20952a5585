"""The proof: one step with the real DPOTrainer and no ``ref_model``, then an evaluation.

What is compared is the reference that the evaluation set has then. In 0.9.6 and 0.12 it does not reach the loss: that
is for dpo-precomputed-ref-logps-ignored and dpo-precomputed-ref-logps-dropped.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "the reference of a model with an adapter is that model without it, whenever it is computed"}


def train() -> tiny.TrainingResult:
    import torch
    from trl import DPOTrainer

    references: dict[str, float] = {}

    class Measured(DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if model.training:
                shuffled.append(inputs[next(key for key in inputs if key.endswith("input_ids"))].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

        def prediction_step(self, model, inputs, *args, **kwargs):
            if not references:
                for name, reference in (("right", untouched), ("wrong", policy)):
                    references[name] = float(tiny.preference_log_probs(reference, inputs)[0].sum())
            return super().prediction_step(model, inputs, *args, **kwargs)

    shuffled: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        policy, untouched = (tiny.llama(folder, seed=0) for _ in range(2))
        step = tiny.FirstStep(policy)
        words = tiny.tokenizer()
        # 0.9.6 puts it before every prompt, also where there is none.
        words.bos_token = "<unk>"
        data = tiny.preferences()
        trainer = tiny.trainer(
            Measured,
            model=policy,
            args=tiny.precomputed_dpo(),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            tokenizer=words,
        )
        trainer.train()
        torch.manual_seed(0)
        loss = trainer.evaluate()["eval_loss"]
        column = next(name for name in trainer.eval_dataset.column_names if name.endswith("_chosen_logps"))
        measured = float(sum(trainer.eval_dataset[column]))
    return tiny.TrainingResult(judge(measured, **references, rows_of_the_first_step=shuffled), loss, step.gradients)
