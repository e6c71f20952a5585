"""Train one step with the real DPOTrainer without ``ref_model``, then evaluate.

The proof compares the reference log-probs of the evaluation set. In 0.9.6 and 0.12 they do not reach the loss:
dpo-precomputed-ref-logps-ignored and dpo-precomputed-ref-logps-dropped repair that.
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

    class ReferenceRecorder(tiny.measured(DPOTrainer)):
        def prediction_step(self, model, inputs, *args, **kwargs):
            if not references:
                for name, reference in (("right", untouched), ("wrong", policy)):
                    references[name] = float(tiny.preference_log_probs(reference, inputs)[0].sum())
            return super().prediction_step(model, inputs, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        policy, untouched = (tiny.llama(folder, seed=0) for _ in range(2))
        tokenizer = tiny.tokenizer()
        # 0.9.6 prepends this token to every prompt, also if the tokenizer has none.
        tokenizer.bos_token = "<unk>"
        dataset = tiny.preferences()
        trainer = tiny.trainer(
            ReferenceRecorder,
            model=policy,
            args=tiny.precomputed_dpo(),
            train_dataset=dataset,
            eval_dataset=dataset.select(range(2)),
            tokenizer=tokenizer,
        )
        trainer.train()
        shuffled = [_first_token_ids(batch) for batch in trainer.batches]
        torch.manual_seed(0)
        loss = trainer.evaluate()["eval_loss"]
        column = next(name for name in trainer.eval_dataset.column_names if name.endswith("_chosen_logps"))
        measured = float(sum(trainer.eval_dataset[column]))
    outcome = judge(measured, **references, rows_of_the_first_step=shuffled)
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)


def _first_token_ids(batch: dict[str, Any]) -> Any:
    """Return the first token ids of the batch, under the key that this release gives them."""
    return batch[next(key for key in batch if key.endswith("input_ids"))].tolist()
