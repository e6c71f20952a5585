"""Train one step with the real DPOTrainer after another one on the same data, which truncated its sequences more.

Policy and reference have the same weights, so the loss of the first step is log 2 if both score the same tokens.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "compiled, the run fails: LlamaForCausalLM does not support len()"}
DATA = True

BETA = 0.5  # The same as in tiny.precomputed_dpo.
LONG = 32
SHORT = 5
"""The longest sequence has 7 tokens with its end; of the rejected completions, which have 3, none is truncated."""


class Step(NamedTuple):
    """The first step of a trainer, and the untrained model's log-probs on its batch."""

    trainer: Any
    loss: float
    gradients: dict[str, Any]
    batch: dict[str, Any]
    log_probs: tuple[Any, Any]


def train() -> tiny.TrainingResult:
    import torch
    from trl.trainer import dpo_trainer

    if not hasattr(dpo_trainer.DPOTrainer, "_precompute_ref_logps"):
        return tiny.TrainingResult(absent("what is precomputed is not kept in a file in this release"))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny.tokenizer()
        earlier = _step(folder, tokenizer, SHORT)
        truncated = {row["prompt_ids"][0]: row for row in earlier.trainer.train_dataset}
        step = _step(folder, tokenizer, LONG)
    policy = step.log_probs
    rows = [truncated[int(token_id)] for token_id in step.batch["input_ids"][: len(policy[0]), 0]]
    stale = tuple(torch.tensor([row[f"ref_{side}_logps"] for row in rows]) for side in ("chosen", "rejected"))
    outcome = judge(
        step.loss,
        right=tiny.dpo_loss(BETA, policy, policy),
        wrong=tiny.dpo_loss(BETA, policy, stale),
        reference=float(step.batch["ref_chosen_logps"].sum()),
        reference_of_the_whole=float(policy[0].sum()),
    )
    return tiny.TrainingResult(outcome, step.loss, step.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train twice with the same settings: the second trainer reads the log-probs that the first has computed."""
    from trl.trainer import dpo_trainer

    if not hasattr(dpo_trainer.DPOTrainer, "_precompute_ref_logps"):
        return tiny.TrainingResult(absent("what is precomputed is not kept in a file in this release"))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny.tokenizer()
        _step(folder, tokenizer, LONG)
        step = _step(folder, tokenizer, LONG, computes_reference=False)
    return tiny.TrainingResult(absent("the settings are those of the run before"), step.loss, step.gradients)


@cache
def _rows() -> str:
    """Return the path of the rows' file, the same in every run.

    A dataset in memory is not cached where another run would look.
    """
    path = Path(tempfile.mkdtemp(), "rows.json")
    tiny.preferences().to_json(path)
    return str(path)


def _step(folder: str, tokenizer: Any, max_length: int, *, computes_reference: bool | None = None) -> Step:
    """Train one step.

    ``computes_reference`` asserts that the reference is computed, or that it is read from a file.
    """
    from datasets import Dataset
    from trl import DPOTrainer

    forward_passes: list[int] = []
    policy, untouched = (tiny.llama(folder, seed=0) for _ in range(2))
    policy.register_forward_hook(lambda *_: forward_passes.append(1))
    # No subclass: up to 1.7.0 the function that tokenizes holds the trainer, and `datasets` hashes its class too.
    fingerprints: list[str] = []
    path_of = Dataset._get_cache_file_path

    def record_fingerprint(dataset: Any, fingerprint: str) -> str:
        fingerprints.append(fingerprint)
        return path_of(dataset, fingerprint)

    with shadowed(Dataset, "_get_cache_file_path", record_fingerprint):
        trainer = tiny.trainer(
            DPOTrainer,
            model=policy,
            args=tiny.precomputed_dpo(max_length=max_length, truncation_mode="keep_end"),
            train_dataset=Dataset.from_json(_rows(), cache_dir=folder),
            tokenizer=tokenizer,
        )
    # The fingerprint of the trainer's dataset contains the time at which the file was made; the last one recorded is
    # the name of the file.
    tiny.fingerprints[-1:] = fingerprints[-1:]
    if computes_reference is not None and computes_reference != bool(forward_passes):
        raise AssertionError(f"the reference was computed in {len(forward_passes)} batches")
    first_step, compute_loss = tiny.FirstStep(trainer.model), trainer.compute_loss
    losses: list[float] = []
    batches: list[dict[str, Any]] = []
    log_probs: list[tuple[Any, Any]] = []

    def recording_compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(dict(inputs))
        log_probs.append(tiny.preference_log_probs(untouched, inputs))
        result = compute_loss(model, inputs, *args, **kwargs)
        losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
        return result

    trainer.compute_loss = recording_compute_loss
    trainer.train()
    return Step(trainer, losses[0], first_step.gradients, batches[0], log_probs[0])
