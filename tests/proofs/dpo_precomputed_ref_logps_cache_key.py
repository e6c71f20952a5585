"""The proof: one step of the real DPOTrainer after another one on the same data, which cut its sequences shorter.

Policy and reference have the same weights, so that the loss of the first step is log 2 if both are of the same tokens.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "compiled, the run fails: LlamaForCausalLM does not support len()"}
DATA = True

BETA = 0.5  # as in tiny.precomputed_dpo
WHOLE = 32
SHORT = 5
"""Tokens of the longest sequence are 7, the last is the end: of the rejected completions of 3 nothing is cut."""


def train() -> tiny.TrainingResult:
    import torch
    import trl.trainer.dpo_trainer as leaf

    if not hasattr(leaf.DPOTrainer, "_precompute_ref_logps"):
        return tiny.TrainingResult(absent("what is precomputed is not kept in a file in this release"))
    with tempfile.TemporaryDirectory() as folder:
        words = tiny.tokenizer()
        before, *_ = _step(folder, words, SHORT)
        kept = {row["prompt_ids"][0]: row for row in before.train_dataset}
        _, loss, seen, batch, policy = _step(folder, words, WHOLE)
    rows = [kept[int(first)] for first in batch["input_ids"][: len(policy[0]), 0]]
    stale = tuple(torch.tensor([row[f"ref_{side}_logps"] for row in rows]) for side in ("chosen", "rejected"))
    outcome = judge(
        loss,
        right=tiny.dpo_loss(BETA, policy, policy),
        wrong=tiny.dpo_loss(BETA, policy, stale),
        reference=float(batch["ref_chosen_logps"].sum()),
        reference_of_the_whole=float(policy[0].sum()),
    )
    return tiny.TrainingResult(outcome, loss, seen.gradients)


def unaffected() -> tiny.TrainingResult:
    """Twice the same settings: the second trainer takes what the first has computed."""
    import trl.trainer.dpo_trainer as leaf

    if not hasattr(leaf.DPOTrainer, "_precompute_ref_logps"):
        return tiny.TrainingResult(absent("what is precomputed is not kept in a file in this release"))
    with tempfile.TemporaryDirectory() as folder:
        words = tiny.tokenizer()
        _step(folder, words, WHOLE)
        _, loss, seen, *_ = _step(folder, words, WHOLE, computes=False)
    return tiny.TrainingResult(absent("the settings are those of the run before"), loss, seen.gradients)


@cache
def _rows() -> str:
    """A file, as what is in memory is cached nowhere that another run would look; the same one in every run."""
    path = Path(tempfile.mkdtemp(), "rows.json")
    tiny.preferences().to_json(path)
    return str(path)


def _step(folder: str, words: Any, max_length: int, *, computes: bool | None = None) -> tuple[Any, ...]:
    """The trainer, its first loss and gradients, the batch, and what the model says of it before it is trained.

    ``computes``: whether the reference must be computed, and not taken from a file.
    """
    from datasets import Dataset
    from trl import DPOTrainer

    computed: list[int] = []
    policy, untouched = (tiny.llama(folder, seed=0) for _ in range(2))
    policy.register_forward_hook(lambda *_: computed.append(1))
    # No subclass: up to 1.7.0 the function that tokenizes holds the trainer, and `datasets` looks at its class, too.
    names: list[str] = []
    path_of = Dataset._get_cache_file_path

    def note(dataset: Any, fingerprint: str) -> str:
        names.append(fingerprint)
        return path_of(dataset, fingerprint)

    with shadowed(Dataset, "_get_cache_file_path", note):
        trainer = tiny.trainer(
            DPOTrainer,
            model=policy,
            args=tiny.precomputed_dpo(max_length=max_length, truncation_mode="keep_end"),
            train_dataset=Dataset.from_json(_rows(), cache_dir=folder),
            tokenizer=words,
        )
    # That of the trainer's dataset has the time in it at which the file was made; the last is the name of the file.
    tiny.fingerprints[-1:] = names[-1:]
    if computes is not None and computes != bool(computed):
        raise AssertionError(f"the reference was computed in {len(computed)} batches")
    seen, compute_loss = tiny.FirstStep(trainer.model), trainer.compute_loss
    steps: list[tuple[Any, ...]] = []

    def measured(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch, policy = dict(inputs), tiny.preference_log_probs(untouched, inputs)
        result = compute_loss(model, inputs, *args, **kwargs)
        loss = float((result[0] if isinstance(result, tuple) else result).detach())
        steps.append((loss, seen, batch, policy))
        return result

    trainer.compute_loss = measured
    trainer.train()
    return trainer, *steps[0]
