"""Train two steps of two micro-batches with the real DPOTrainer, with and without a ``ref_model``, and evaluate.

Losses and gradients are compared with the formula. With a ``ref_model``, and with an adapter, the loss is right, and
the bug costs a forward of the reference in each micro-batch.
"""

from __future__ import annotations

import pickle
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import several_runs

ID = "dpo-precomputed-ref-logps-dropped"
OVERLAYS = ()
PARITY = True
EQUIVALENT = {
    "keep_the_values: `if all(name in examples[0] for name in _COLUMNS):` -> "
    "`if all(name in examples[ -1] for name in _COLUMNS):`": "all rows of a dataset have the same columns",
}


def train() -> tiny.TrainingResult:
    result = dpo_steps.precomputed_steps()
    if trl_hotfix.status()[ID].state.value == "applied":
        check_that_it_says_where_it_acts()
        check_custom_collator_is_named_once()
        check_pickled_collator_carries_the_patch()
    return result


def unaffected() -> tiny.TrainingResult:
    """Train without a precomputed reference: with a ``ref_model``, with an adapter, and with a worker."""
    formula = dpo_steps.reference_or_policy
    runs = {
        "ref_model": dpo_steps.dpo_steps(formula, reference=1),
        "adapter": dpo_steps.dpo_steps(formula, adapter=True),
        "worker": dpo_steps.dpo_steps(formula, reference=1, dataloader_num_workers=1),
    }
    assert all(set(acts(run.trainer)) <= {None, 0} for run in runs.values())
    return several_runs(runs, absent("nothing was precomputed"))


class Forgetful:
    """A collator that drops the reference."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        return self.collate([{key: row[key] for key in row if not key.startswith("ref_")} for row in rows])


def acts(trainer: Any) -> list[int | None]:
    """Return in how many calls the trainer's methods have acted."""
    names = ("_set_signature_columns_if_needed", "get_batch_loss_metrics")
    return [tiny.acts(ID, f"trl.trainer.dpo_trainer:DPOTrainer.{name}", trainer) for name in names]


def check_that_it_says_where_it_acts() -> None:
    """Check the record of a run whose columns and values are added."""
    run = dpo_steps.dpo_steps(dpo_steps.reference_or_policy, reference=1, precompute_ref_log_probs=True)
    columns, warnings = acts(run.trainer)
    assert columns, "the columns were added, and nothing says so"
    assert warnings == 0


def check_custom_collator_is_named_once() -> None:
    def forget(trainer: Any) -> None:
        trainer.data_collator = Forgetful(trainer.data_collator)

    formula = dpo_steps.reference_or_policy
    run, messages = tiny.warnings_of(
        lambda: dpo_steps.dpo_steps(formula, reference=1, prepare=forget, precompute_ref_log_probs=True)
    )
    assert len(messages) == 1, messages
    assert "Forgetful" in messages[0]
    assert acts(run.trainer)[1] == 1


def check_pickled_collator_carries_the_patch() -> None:
    """Check that unpickling the collator patches its class: a worker that is not forked imports it unpatched."""
    trainer = dpo_steps.dpo_steps(dpo_steps.reference_or_policy, reference=1).trainer
    assert b"trl_hotfix" not in pickle.dumps(trainer.data_collator)
    trainer._signature_columns, trainer.args.dataloader_num_workers = None, 1
    trainer._set_signature_columns_if_needed()
    pickled = pickle.dumps(trainer.data_collator)
    assert ID.encode() in pickled
    row = {f"{name}_input_ids": [1, 2] for name in ("prompt", "chosen", "rejected")}
    batch = pickle.loads(pickled)([{**row, "ref_chosen_logps": -1.0, "ref_rejected_logps": -3.0}])
    assert (batch["ref_chosen_logps"].tolist(), batch["ref_rejected_logps"].tolist()) == ([-1.0], [-3.0])
