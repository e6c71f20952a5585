"""Train two steps of two micro-batches with the real DPOTrainer, with and without a ``ref_model``, and evaluate.

Losses and gradients are compared with the formula. With a ``ref_model``, and with an adapter, the loss is right, and
the bug costs a forward of the reference in each micro-batch.
"""

from __future__ import annotations

from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import several_runs

ID = "dpo-precomputed-ref-logps-ignored"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer.get_batch_loss_metrics"
OVERLAYS = ()
PARITY = True
EQUIVALENT = {"applied twice": "the inner one answers the forward of the reference, so the outer one is not asked"}


def train() -> tiny.TrainingResult:
    import trl

    if trl.__version__.startswith("0.12."):
        return tiny.TrainingResult(absent("the batch has no reference log-probs (dpo-precomputed-ref-logps-dropped)"))
    return dpo_steps.precomputed_steps()


def unaffected() -> tiny.TrainingResult:
    """Train without a precomputed reference, with ``rpo_alpha``, and with a collator that drops the reference."""

    class Forgetful:
        def __init__(self, collate):
            self.collate = collate

        def __call__(self, rows):
            return self.collate([{key: row[key] for key in row if not key.startswith("ref")} for row in rows])

    def forget(trainer):
        trainer.data_collator = Forgetful(trainer.data_collator)

    formula = dpo_steps.reference_or_policy
    runs = {
        "not precomputed": dpo_steps.dpo_steps(formula, reference=1),
        "rpo_alpha": dpo_steps.dpo_steps(formula, precompute_ref_log_probs=True, rpo_alpha=0.5),
        "forgotten": dpo_steps.dpo_steps(formula, prepare=forget, precompute_ref_log_probs=True),
    }
    assert all(tiny.acts(ID, TARGET, run.trainer) in (None, 0) for run in runs.values())
    return several_runs(runs, absent("nothing was precomputed, or the batch has no use for it"))
