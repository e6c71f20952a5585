"""Train two steps of two micro-batches with DPOTrainer and sequences longer than ``max_length``, and evaluate.

Losses and accumulated gradients are compared with the loss of the paper (arXiv:2305.18290, equation 7) on the last
tokens of each sequence, and on the last columns of the batch. With 0.18.0 the first step is compared: whether later
ones begin at the same weights depends on what transformers divides a loss by.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps

ID = "dpo-keep-end-zeroes-samples"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer.concatenated_forward"
OVERLAYS = ()
PARITY = True

MAX_LENGTH = 7
"""Longer than each completion: a token of its prompt is left."""


def cuts_or_zeroes(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of the last tokens of each sequence (``right``), and of the last columns (``wrong``)."""
    import torch

    sides = [dpo_steps.whole_sequences(batch, side) for side in ("chosen", "rejected")]
    width = max(int(attention.sum(1).max()) for _, attention, _ in sides)
    padded = [[torch.nn.functional.pad(part, (0, width))[:, :width] for part in side] for side in sides]
    parts = [torch.cat(both) for both in zip(*padded, strict=True)]
    lengths = parts[1].sum(1)
    starts = {"right": (lengths - MAX_LENGTH).clamp(min=0), "wrong": torch.full_like(lengths, width - MAX_LENGTH)}
    losses = {}
    for name, start in starts.items():
        # Right are the columns from there on, and padding behind them.
        columns = start.clamp(min=0)[:, None] + torch.arange(min(MAX_LENGTH, width))
        token_ids, attention, completion = (part.gather(1, columns.clamp(max=width - 1)) for part in parts)
        of_policy = summed_log_probs(policy, token_ids, attention, completion)
        with torch.no_grad():
            of_reference = summed_log_probs(reference, token_ids, attention, completion)
        losses[name] = dpo_steps.sigmoid_loss(of_policy, of_reference)
    return losses


def summed_log_probs(model: Any, token_ids: Any, attention: Any, completion: Any) -> tuple[Any, Any]:
    """Return those of the chosen and of the rejected sequences. TRL predicts the first token of a row by its last."""
    logits = model(input_ids=token_ids, attention_mask=attention, use_cache=False).logits
    log_probs = logits.log_softmax(-1).roll(1, 1).gather(2, token_ids[..., None])[..., 0]
    chosen, rejected = (log_probs * completion).sum(1).chunk(2)
    return chosen, rejected


def run(formula: dpo_steps.Formula = lambda *_: {}, **settings: Any) -> tiny.FormulaSteps:
    defaults = {"max_length": MAX_LENGTH, "truncation_mode": "keep_end"}
    if tiny.variant != "lora":
        settings["reference"] = 1
    return dpo_steps.dpo_steps(formula, **{**defaults, **settings})


def train() -> tiny.TrainingResult:
    from trl import DPOTrainer

    forward = getattr(DPOTrainer, "concatenated_forward", None)
    if forward is None or "truncation_mode" not in inspect.getsource(forward):
        return tiny.TrainingResult(absent("the forward does not truncate by truncation_mode"))
    steps = run(cuts_or_zeroes)
    result = steps.first_step
    result.outcome = dpo_steps.judged_steps(steps)
    acted = tiny.acts(ID, TARGET, steps.trainer)
    # The policy's forwards and the reference's.
    assert acted in (None, 2 * len(steps.micro_batches)), f"the wrapper acts in {acted} calls"
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with sequences that are short, or all of one length, with ``keep_start``, and without ``max_length``."""
    runs = {
        "short": run(max_length=32),
        "of one length": run(max_length=5, train_dataset=of_one_length()),
        "keep_start": run(truncation_mode="keep_start"),
        "no max_length": run(max_length=None),
    }
    for name, steps in runs.items():
        assert not tiny.acts(ID, TARGET, steps.trainer), f"the wrapper acts: {name}"
    return dpo_steps.several_runs(runs, absent("all sequences lose the same columns, or none"))


def of_one_length() -> Any:
    """Return pairs whose completions have three words, both of them."""
    return tiny.preferences().map(lambda row: {"rejected": f"{row['rejected']} w1"})
