"""The proof: one step of the real SFTTrainer with a tokenizer whose padding token is the end-of-sequence token.

What is right is the mean loss of all tokens but the first of each sequence, each by itself, without TRL's code;
what is wrong is the same without the ends. transformers from 4.46 on and before 5 divides by one more token for each
sequence, which is another bug, and no part of what is compared.
"""

from __future__ import annotations

import inspect
import pickle
import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "sft-eos-masked-when-pad-is-eos"

OVERLAYS = ()
PARITY = True
VARIANTS = "the labels are made by the collator, outside of the model and whatever part of it is trained"

TEXTS = [f"w{index} w{index + 1}" + " w9" * index + " <eos>" for index in range(4)]
ROWS = [{"text": each} for each in TEXTS]


def ending_words() -> Any:
    words = tiny.chat_tokenizer()
    words.pad_token = words.eos_token
    return words


def by_hand(*, ends: bool) -> float:
    import torch

    losses = []
    words = tiny.tokenizer()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = tiny.llama(folder, seed=0)
        for text in TEXTS:
            ids = torch.tensor([words(text)["input_ids"]])
            each = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            losses.append(each if ends else each[:-1])
    return float(torch.cat(losses).mean())


def too_many(run: tiny.SftRun) -> float:
    """The number of tokens that the loss is divided by, divided by that of the tokens that are predicted."""
    from transformers import Trainer

    counts = "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters
    counted = run.batch["labels"] != -100
    first = counts and not getattr(run.trainer, "_loss_shifts_labels", False)
    return float(counted.sum() / counted[:, 1:].sum()) if first else 1.0


def train() -> tiny.TrainingResult:
    run = tiny.sft_step(ROWS, words=ending_words())
    factor = too_many(run)
    loss, gradients = run.loss * factor, {name: its * factor for name, its in run.gradients.items()}
    outcome = judge(loss, right=by_hand(ends=True), wrong=by_hand(ends=False))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    if patched:
        packed = tiny.sft_step(ROWS, words=ending_words(), packing=True, max_seq_length=6, max_length=6).batch
        # Up to 0.14 packed sequences have labels of their own.
        assert packed["labels"].equal(packed["input_ids"])
        labels = run.batch["labels"]
        assert (labels == 1).sum(1).tolist() == [1] * 4
        assert (labels != -100).equal(run.batch["attention_mask"] == 1)
        # As a worker process of a data loader would get it.
        examples = [
            {"input_ids": [5, 1], "attention_mask": [1, 1]},
            {"input_ids": [5, 6, 1], "attention_mask": [1] * 3},
        ]
        collator = run.trainer.data_collator
        assert pickle.loads(pickle.dumps(collator))(examples)["labels"].tolist() == [[5, 1, -100], [5, 6, 1]]
    return tiny.TrainingResult(outcome, loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """A padding token of its own, and a collator that the user gives."""
    from transformers import DataCollatorForLanguageModeling

    given = {"data_collator": DataCollatorForLanguageModeling(tokenizer=ending_words(), mlm=False)}
    runs = {
        "own padding": tiny.sft_step(ROWS),
        "own collator": tiny.sft_step(ROWS, words=ending_words(), given=given),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
