"""The proof: one step of the real SFTTrainer with a tokenizer whose padding token is the end-of-sequence token.

What is right is the loss of all tokens but the first of each sequence, each sequence by itself, without TRL's code;
what is wrong is the same without the ends. It is divided by the number of these tokens, or, as transformers has done
since 4.46, by one more for each sequence.
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
    from transformers import Trainer

    losses = []
    words = tiny.tokenizer()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = tiny.llama(folder, seed=0)
        for text in TEXTS:
            ids = torch.tensor([words(text)["input_ids"]])
            each = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            losses.append(each if ends else each[:-1])
    more = len(TEXTS) if "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters else 0
    every = torch.cat(losses)
    return float(every.sum() / (len(every) + more))


def train() -> tiny.Seen:
    run = tiny.sft_step(ROWS, words=ending_words())
    outcome = judge(run.loss, right=by_hand(ends=True), wrong=by_hand(ends=False))
    packed = tiny.sft_step(ROWS, words=ending_words(), packing=True, max_seq_length=6, max_length=6).batch
    # Up to 0.14 packed sequences have labels of their own.
    assert outcome.verdict.value == "reproduced" or packed["labels"].equal(packed["input_ids"])
    patched = trl_hotfix.status()[ID].state.value == "applied"
    if patched:
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
    return tiny.Seen(outcome, run.loss, run.gradients)


def unaffected() -> tiny.Seen:
    """A padding token of its own, and a collator that the user gives."""
    from transformers import DataCollatorForLanguageModeling

    given = {"data_collator": DataCollatorForLanguageModeling(tokenizer=ending_words(), mlm=False)}
    runs = {
        "own padding": tiny.sft_step(ROWS),
        "own collator": tiny.sft_step(ROWS, words=ending_words(), given=given),
    }
    return tiny.Seen(absent("whom it does not hit"), *tiny.several(runs))
