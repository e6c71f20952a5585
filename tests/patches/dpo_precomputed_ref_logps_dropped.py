"""The proof: two steps with the real DPOTrainer and no ``ref_model``.

In the first step policy and reference are equal, in the second they are not, and the loss says with which reference it
was computed. The dataset is one batch, so that the shuffle, which the precomputing shifts, plays no part.
"""

from __future__ import annotations

import logging
import math
import pickle
import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import judge
from trl_hotfix.patches import dpo_precomputed_ref_logps_dropped as patch

import tiny

ID = "dpo-precomputed-ref-logps-dropped"

OVERLAYS = ()
PARITY = True


def train() -> tiny.Seen:
    import torch
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []
    references: list[int] = []
    seen: dict[str, Any] = {}

    class Measured(DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            # What is left at the end are the gradients of the last step.
            step.gradients.clear()
            references.clear()
            reference = tiny.preference_log_probs(untouched, inputs)
            seen["right"] = tiny.dpo_loss(0.5, tiny.preference_log_probs(model, inputs), reference)
            seen["right values"] = float(reference[0].sum())
            references.clear()
            result = super().compute_loss(model, inputs, *args, **kwargs)
            seen["forwards"] = len(references)
            seen["values"] = float(inputs["ref_chosen_logps"].sum()) if "ref_chosen_logps" in inputs else None
            losses.append(float(result.detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy, untouched = (tiny.llama(folder, seed=0) for _ in range(2))
        step = tiny.FirstStep(policy)
        policy.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else references.append(1))
        arguments = tiny.config(
            DPOConfig,
            max_steps=2,
            learning_rate=1.0,
            optim="sgd",
            beta=0.5,
            precompute_ref_log_probs=True,
            max_length=16,
            max_prompt_length=8,
        )
        trainer = tiny.trainer(
            Measured,
            model=policy,
            args=arguments,
            train_dataset=tiny.preferences().select(range(2)),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    outcome = judge(
        losses[1],
        right=seen["right"],
        wrong=math.log(2),
        reference_forwards=seen["forwards"],
        reference_in_batch=seen["values"],
        reference_of_untouched_model=seen["right values"],
    )
    assert seen["forwards"] == (1 if outcome.verdict.value == "reproduced" else 0)
    if seen["values"] is not None:
        assert math.isclose(seen["values"], seen["right values"], rel_tol=1e-6)
    # Before the checks below, which train once more.
    found = tiny.Seen(outcome, losses[1], dict(step.gradients))
    if trl_hotfix.status()[ID].state.value == "applied":
        a_collator_for_workers_brings_the_patch_along(trainer)
        a_collator_of_the_users_own_is_named_once(trainer)
    elif outcome.verdict.value == "reproduced":
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
