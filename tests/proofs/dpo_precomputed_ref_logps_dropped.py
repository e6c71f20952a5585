"""Train two steps with the real DPOTrainer without ``ref_model``: both steps must have the same reference."""

from __future__ import annotations

import pickle
from typing import Any

import trl_hotfix
from trl_hotfix.patches import dpo_precomputed_ref_logps_dropped as patch

import tiny

ID = "dpo-precomputed-ref-logps-dropped"

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    trainer, result = tiny.two_steps_of_precomputed_dpo()
    if trl_hotfix.status()[ID].state.value == "applied":
        check_pickled_collator_carries_the_patch(trainer)
        check_custom_collator_is_named_once(trainer)
    elif result.outcome.verdict.value == "reproduced":
        check_each_half_alone_repairs_nothing()
    return result


def check_pickled_collator_carries_the_patch(trainer: Any) -> None:
    """Check that unpickling the collator patches its class: a worker that is not forked imports it unpatched."""
    assert b"trl_hotfix" not in pickle.dumps(trainer.data_collator)
    trainer._signature_columns, trainer.args.dataloader_num_workers = None, 1
    trainer._set_signature_columns_if_needed()
    pickled = pickle.dumps(trainer.data_collator)
    assert b"trl_hotfix" in pickled
    assert b"dpo-precomputed-ref-logps-dropped" in pickled
    row = {f"{name}_input_ids": [1, 2] for name in ("prompt", "chosen", "rejected")}
    batch = pickle.loads(pickled)([{**row, "ref_chosen_logps": -1.0, "ref_rejected_logps": -3.0}])
    assert (batch["ref_chosen_logps"].tolist(), batch["ref_rejected_logps"].tolist()) == ([-1.0], [-3.0])


def check_custom_collator_is_named_once(trainer: Any) -> None:
    class Forgetful:
        def __call__(self, rows: Any) -> Any:
            kept = [{key: value for key, value in row.items() if not key.startswith("ref_")} for row in rows]
            return collate(kept)

    collate, trainer.data_collator = trainer.data_collator, Forgetful()
    trainer.args.dataloader_num_workers = 0
    _, messages = tiny.warnings_of(trainer.train)
    assert len(messages) == 1
    assert "Forgetful" in messages[0]


def check_each_half_alone_repairs_nothing() -> None:
    import wrapt
    from trl.trainer import dpo_trainer

    halves = {
        (dpo_trainer.DPOTrainer, "_set_signature_columns_if_needed"): patch.keep_the_columns,
        (dpo_trainer.PreferenceCollator, "torch_call"): patch.keep_the_values,
    }
    for (owner, name), wrapper in halves.items():
        method = vars(owner)[name]
        setattr(owner, name, wrapt.FunctionWrapper(method, wrapper))
        try:
            assert patch.precomputed_reference_is_in_the_loss(dpo_trainer).verdict.value == "reproduced"
        finally:
            setattr(owner, name, method)
