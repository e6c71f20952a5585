"""SFT never trains on the end-of-sequence token if it is the padding token too.

The default collator is transformers' ``DataCollatorForLanguageModeling``, which recognises padding by its id: labels
with the id of the padding token become -100. TRL 0.16.1 (pull request 3200) has a collator of its own, which recognises
padding by its position. The wrapper makes the collator that ``SFTTrainer`` has made do the same.
"""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    as_tokenizer_of,
    constructed,
    default_arguments,
    single_process,
    tiny_causal_lm,
)


@wrapper
def learn_the_end(call: Call) -> None:
    """Make the trainer, and let its default collator recognise padding by the ``attention_mask``."""
    from transformers import DataCollatorForLanguageModeling

    call()
    collator = call.trainer.data_collator
    # A subclass, or a collator that was passed, is the user's choice.
    if call["data_collator"] is not None or type(collator) is not DataCollatorForLanguageModeling:
        return
    tokenizer = collator.tokenizer
    if not collator.mlm and tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        # A nested function or another class would fail where worker processes must pickle the collator.
        call.act()
        collator.torch_call = functools.partial(_labels_of_all_but_padding, collator)


def _labels_of_all_but_padding(collator: Any, examples: list[Any]) -> Any:
    """Return the collator's own batch with labels ``(batch, length)`` that are -100 only on the padding."""
    batch = type(collator).torch_call(collator, examples)
    if "attention_mask" in batch:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def ends_are_labels(module: ModuleType) -> Outcome:
    """Count the end-of-sequence labels in a batch of two sequences of a trainer with its default collator."""
    if not getattr(module, "DataCollatorForLanguageModeling", module.SFTTrainer).__module__.startswith("transformers."):
        return absent("this release has a collator of its own, which knows padding by its place")
    tokenizer: Any = CharacterTokenizer()
    tokenizer.pad_token, tokenizer.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
    model = tiny_causal_lm(SimpleNamespace(_name_or_path="tiny", _attn_implementation="eager"))
    args = default_arguments(module.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, dataset_text_field="text")
    arguments = {"model": model, "args": args, **as_tokenizer_of(module.SFTTrainer, tokenizer)}
    with single_process(module):
        trainer = constructed(module.SFTTrainer, **arguments)
    labels = trainer.data_collator([tokenizer("a\1"), tokenizer("abc\1")])["labels"].tolist()
    return judge(sum(row.count(1) for row in labels), right=2, wrong=0, labels=labels)
