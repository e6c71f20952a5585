"""The proof: one step of the real SFTTrainer with a tokenizer whose padding token is the end-of-sequence token.

The expected loss is the mean over all tokens but the first of each sequence, computed one sequence at a time without
TRL's code. The wrong loss is the same without the ends. transformers from 4.46 on and before 5 divides by one more
token for each sequence, which is another bug; the comparison corrects for it.
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
ROWS = [{"text": text} for text in TEXTS]
EQUIVALENT = {"applied twice": "the labels of all but padding are the same again"}


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
            per_token = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            losses.append(per_token if ends else per_token[:-1])
    return float(torch.cat(losses).mean())


def normaliser_excess(run: tiny.SftRun) -> float:
    """Return the number of tokens that the loss is divided by, divided by the number of predicted tokens."""
    from transformers import Trainer

    counts = "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters
    counted = run.batch["labels"] != -100
    counts_first = counts and not getattr(run.trainer, "_loss_shifts_labels", False)
    return float(counted.sum() / counted[:, 1:].sum()) if counts_first else 1.0


def train() -> tiny.TrainingResult:
    run = tiny.sft_step(ROWS, words=ending_words())
    factor = normaliser_excess(run)
    loss, gradients = run.loss * factor, {name: gradient * factor for name, gradient in run.gradients.items()}
    outcome = judge(loss, right=by_hand(ends=True), wrong=by_hand(ends=False))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    if patched:
        packed = tiny.sft_step(ROWS, words=ending_words(), packing=True, max_seq_length=6, max_length=6).batch
        # Up to 0.14 packed sequences have labels of their own.
        assert packed["labels"].equal(packed["input_ids"])
        labels = run.batch["labels"]
        assert (labels == 1).sum(1).tolist() == [1] * 4
        assert (labels != -100).equal(run.batch["attention_mask"] == 1)
        # A worker process of a data loader gets a pickled collator.
        examples = [
            {"input_ids": [5, 1], "attention_mask": [1, 1]},
            {"input_ids": [5, 6, 1], "attention_mask": [1] * 3},
        ]
        collator = run.trainer.data_collator
        assert pickle.loads(pickle.dumps(collator))(examples)["labels"].tolist() == [[5, 1, -100], [5, 6, 1]]
    return tiny.TrainingResult(outcome, loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train with a padding token of its own, and with a collator that the user passes."""
    from transformers import DataCollatorForLanguageModeling

    arguments = {"data_collator": DataCollatorForLanguageModeling(tokenizer=ending_words(), mlm=False)}
    runs = {
        "own padding": tiny.sft_step(ROWS),
        "own collator": tiny.sft_step(ROWS, words=ending_words(), trainer_arguments=arguments),
    }
    return tiny.TrainingResult(absent("whom it does not hit"), *tiny.several(runs))
