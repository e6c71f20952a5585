"""SFT never trains on the end-of-sequence token if it is the padding token too.

The default collator is transformers' ``DataCollatorForLanguageModeling``, which recognises padding by its id: labels
with the id of the padding token become -100. TRL 0.16.1 (pull request 3200) has a collator of its own, which recognises
padding by its position. The wrapper makes the collator that ``SFTTrainer`` has made do the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, act, argument, judge
from ..model import Outcome
from ..testing import CharacterTokenizer, constructed, default_arguments, single_process, tiny_causal_lm


def learn_the_end(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the trainer, and let its default collator recognise padding by the ``attention_mask``."""
    from transformers import DataCollatorForLanguageModeling

    wrapped(*args, **kwargs)
    collator = instance.data_collator
    # A subclass, or a collator that was passed, is the user's choice.
    if (
        argument(wrapped, args, kwargs, "data_collator") is not None
        or type(collator) is not DataCollatorForLanguageModeling
    ):
        return
    tokenizer = collator.tokenizer
    if not collator.mlm and tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        # A nested function or another class would fail where worker processes must pickle the collator.
        act()
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
    tokenizer = CharacterTokenizer()
    tokenizer.pad_token, tokenizer.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    tokenizer_argument = "processing_class" if "processing_class" in parameters else "tokenizer"
    model = tiny_causal_lm(SimpleNamespace(_name_or_path="tiny", _attn_implementation="eager"))
    args = default_arguments(module.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, dataset_text_field="text")
    with single_process(module):
        trainer = constructed(module.SFTTrainer, model=model, args=args, **{tokenizer_argument: tokenizer})
    batch = trainer.data_collator([tokenizer(f"{text}{tokenizer.eos_token}") for text in ("a", "abc")])
    ends = int((batch["labels"] == tokenizer.eos_token_id).sum())
    return judge(float(ends), right=2.0, wrong=0.0, labels=batch["labels"].tolist())
