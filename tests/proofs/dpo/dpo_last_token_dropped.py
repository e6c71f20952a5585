"""Train two steps of two micro-batches with DPOTrainer, on pairs whose longest prompt has short completions, and
evaluate.

Losses and accumulated gradients are compared with the loss of the paper (arXiv:2305.18290, equation 7) on all tokens,
and on all but the last one of each sequence that is as long as the longest of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent
from trl_hotfix.model import Verdict

import tiny
from tiny import dpo_steps

ID = "dpo-last-token-dropped"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer.concatenated_forward"
OVERLAYS = ()
PARITY = True
EQUIVALENT = {
    'cut_padding_alone: `mask = sequences["completion_attention_mask"] = pad(completions, (0, 1))` -> '
    '`mask = sequences["completion_attention_mask"] = pad(completions, (0, 2))`': "empty columns are cut off",
    "cut_padding_alone: `mask[longest, of_completions[longest]] = 1` -> `mask[longest, of_completions[longest]] = 2`": (
        "TRL asks whether it is 0, and cuts it off"
    ),
}


def pairs(lengths: list[tuple[int, int, int]]) -> Any:
    """Return prompts with chosen and rejected completions of these lengths."""
    from datasets import Dataset

    def words(row: int, step: int, length: int) -> str:
        return " ".join(f"w{(7 * row + step * place) % 60}" for place in range(length))

    rows = [
        {"prompt": words(row, 1, p), "chosen": " " + words(row, 3, chosen), "rejected": " " + words(row, 5, rejected)}
        for row, (p, chosen, rejected) in enumerate(lengths)
    ]
    return Dataset.from_list(rows)


SHORTER_WITH_LONGER = [(2, 3, 12), (3, 11, 2), (4, 1, 9), (5, 8, 4), (6, 2, 7), (7, 5, 1), (8, 1, 4), (9, 3, 2)]
"""In each batch of two the longer prompt has shorter completions; the longest sequence is of either side."""
LONGER_WITH_LONGER = [(2, 1, 2), (3, 3, 1), (4, 2, 4), (5, 5, 3), (6, 2, 6), (7, 7, 1), (8, 1, 8), (9, 9, 3)]


def whole_or_cut(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss of all tokens (``right``), and of all but the last column (``wrong``)."""
    import torch

    sides = [dpo_steps.whole_sequences(batch, side) for side in ("chosen", "rejected")]
    lengths = [attention.sum(1) for _, attention, _ in sides]
    longest = max(int(length.max()) for length in lengths)
    completions = max(batch[f"{side}_input_ids"].shape[1] for side in ("chosen", "rejected"))
    is_cut = longest < batch["prompt_input_ids"].shape[1] + completions
    losses = {}
    for name in ("right", "wrong"):
        log_probs: list[list[Any]] = [[], []]
        for (ids, attention, completion), length in zip(sides, lengths, strict=True):
            counted = completion.clone()
            if name == "wrong" and is_cut:
                is_longest = length == longest
                counted[is_longest, length[is_longest] - 1] = 0
            log_probs[0].append(summed_log_probs(policy, ids, attention, counted))
            with torch.no_grad():
                log_probs[1].append(summed_log_probs(reference, ids, attention, counted))
        of_policy, of_reference = (tuple(both) for both in log_probs)
        losses[name] = dpo_steps.sigmoid_loss(of_policy, of_reference)
    return losses


def summed_log_probs(model: Any, ids: Any, attention: Any, counted: Any) -> Any:
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (log_probs * counted[:, 1:]).sum(1)


def run(lengths: list[tuple[int, int, int]], formula: dpo_steps.Formula = lambda *_: {}, **settings: Any) -> Any:
    defaults = {"max_length": None, "train_dataset": pairs(lengths), "words": tiny.tokenizer()}
    if tiny.variant != "lora":
        settings["reference"] = 1
    return dpo_steps.dpo_steps(formula, **{**defaults, **settings})


def train() -> tiny.TrainingResult:
    from trl import DPOTrainer

    if not hasattr(DPOTrainer, "concatenated_forward"):
        return tiny.TrainingResult(absent("there is no concatenated_forward"))
    steps = run(SHORTER_WITH_LONGER, whole_or_cut)
    result = steps.first_step
    result.outcome = dpo_steps.judged_steps(steps)
    if result.outcome.verdict is Verdict.FIXED:
        assert tiny.acts(ID, TARGET, steps.trainer) in (None, 2 * (len(steps.micro_batches) - 1))
        # The longest sequences have 15 tokens, their end among them: none is too long.
        dpo_steps.assert_right(run(SHORTER_WITH_LONGER, whole_or_cut, max_length=15))
    return result


def unaffected() -> tiny.TrainingResult:
    """Train where the longest prompt has the longest completion, and on batches of one pair."""
    runs = {
        "longer with longer": run(LONGER_WITH_LONGER),
        "one pair": run(SHORTER_WITH_LONGER, per_device_train_batch_size=1, per_device_eval_batch_size=1),
    }
    for name, steps in runs.items():
        assert not tiny.acts(ID, TARGET, steps.trainer), f"the wrapper acts: {name}"
    return dpo_steps.several_runs(runs, absent("a batch has no column of padding alone"))
