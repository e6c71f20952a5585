"""The proof: one step of the real SFTTrainer, whose loss should be the mean over the predicted tokens.

The expected loss is the mean cross-entropy of all tokens but the first of each sequence, one sequence at a time and
without TRL's code. The wrong loss is their sum divided by the number of all tokens.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

ID = "sft-loss-normaliser-counts-first-token"

OVERLAYS = ()
# transformers has fixed the bug, and no release of TRL has.
PARITY = False

TEXTS = [f"w{index} w{index + 1}" + " w9" * index + " <eos>" for index in range(4)]
ROWS = [{"text": text} for text in TEXTS]


def by_hand(model: Any) -> tuple[float, float]:
    """Return the mean over the predicted tokens, and the same sum divided by the number of all tokens."""
    import torch

    words = tiny.tokenizer()
    rows = [torch.tensor([words(text)["input_ids"]]) for text in TEXTS]
    with torch.no_grad():
        sums = [
            torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum") for ids in rows
        ]
    total, tokens = float(sum(sums)), sum(ids.numel() for ids in rows)
    return total / (tokens - len(rows)), total / tokens


def train() -> tiny.TrainingResult:
    run = tiny.sft_step(ROWS)
    assert (run.batch["labels"][:, 0] != -100).all()
    with tempfile.TemporaryDirectory() as folder:
        right, wrong = by_hand(tiny.llama(folder, seed=0))
    return tiny.TrainingResult(judge(run.loss, right=right, wrong=wrong), run.loss, run.gradients)


def without_first_labels(examples: list[Any]) -> dict[str, Any]:
    import torch

    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def unaffected() -> tiny.TrainingResult:
    """Train on first tokens that are not labels, on predicted first tokens, and with a loss that the user computes."""
    from peft import PromptTuningConfig
    from trl import SFTTrainer

    def total(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.logsumexp(-1).sum() / num_items_in_batch

    runs = {"no labels": tiny.sft_step(ROWS, trainer_arguments={"data_collator": without_first_labels})}
    virtual = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    try:
        runs["virtual tokens"] = tiny.sft_step(ROWS, trainer_arguments={"peft_config": virtual})
    except RuntimeError as error:
        # From 0.15 to 0.21 TRL's count of right predictions fails with virtual tokens.
        if "must match the size" not in str(error):
            raise
    if "compute_loss_func" in tiny.parameters(SFTTrainer):
        runs["own loss"] = tiny.sft_step(ROWS, trainer_arguments={"compute_loss_func": total}, loss_type="nll")
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
