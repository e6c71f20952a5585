"""The proof: the second step with the real DPOTrainer and no ``ref_model`` has the reference of the first."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import trl_hotfix
from trl_hotfix.patches import dpo_precomputed_ref_logps_dropped as patch

import tiny

ID = "dpo-precomputed-ref-logps-dropped"

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    trainer, found = tiny.two_steps_of_precomputed_dpo()
    if trl_hotfix.status()[ID].state.value == "applied":
        a_collator_for_workers_brings_the_patch_along(trainer)
        a_collator_of_the_users_own_is_named_once(trainer)
    elif found.outcome.verdict.value == "reproduced":
        one_half_alone_repairs_nothing()
    return found


def a_collator_for_workers_brings_the_patch_along(trainer: Any) -> None:
    """A worker that is not forked imports an unpatched class; unpickling the collator has to patch it."""
    assert b"trl_hotfix" not in pickle.dumps(trainer.data_collator)
    trainer._signature_columns, trainer.args.dataloader_num_workers = None, 1
    trainer._set_signature_columns_if_needed()
    pickled = pickle.dumps(trainer.data_collator)
    assert b"trl_hotfix" in pickled
    assert b"dpo-precomputed-ref-logps-dropped" in pickled
    row = {f"{each}_input_ids": [1, 2] for each in ("prompt", "chosen", "rejected")}
    batch = pickle.loads(pickled)([{**row, "ref_chosen_logps": -1.0, "ref_rejected_logps": -3.0}])
    assert (batch["ref_chosen_logps"].tolist(), batch["ref_rejected_logps"].tolist()) == ([-1.0], [-3.0])


def a_collator_of_the_users_own_is_named_once(trainer: Any) -> None:
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    class Forgetful:
        def __call__(self, rows: Any) -> Any:
            kept = [{key: value for key, value in row.items() if not key.startswith("ref_")} for row in rows]
            return collate(kept)

    handler = Handler()
    logging.getLogger("trl_hotfix").addHandler(handler)
    collate, trainer.data_collator = trainer.data_collator, Forgetful()
    trainer.args.dataloader_num_workers = 0
    try:
        trainer.train()
        assert len(said) == 1
        assert "Forgetful" in said[0]
    finally:
        logging.getLogger("trl_hotfix").removeHandler(handler)


def one_half_alone_repairs_nothing() -> None:
    import trl.trainer.dpo_trainer as leaf
    import wrapt

    halves = {
        (leaf.DPOTrainer, "_set_signature_columns_if_needed"): patch.keep_the_columns,
        (leaf.PreferenceCollator, "torch_call"): patch.keep_the_values,
    }
    for (owner, name), wrapper in halves.items():
        before = vars(owner)[name]
        setattr(owner, name, wrapt.FunctionWrapper(before, wrapper))
        try:
            assert patch.precomputed_reference_is_in_the_loss(leaf).verdict.value == "reproduced"
        finally:
            setattr(owner, name, before)
