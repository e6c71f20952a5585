"""SFT: where the padding token is the end-of-sequence token, no end of a sequence is ever learned.

The default collator is transformers' ``DataCollatorForLanguageModeling``, which knows padding by its id: labels with
the id of the padding token become -100. ``SFTTrainer`` itself makes the end-of-sequence token the padding token of a
tokenizer that has none. Then all ends are left out of the loss, since 0.15.0 also those inside packed sequences, and
the model does not learn to stop.

TRL 0.16.1 (pull request 3200) has a collator of its own, which knows padding by its place. Here the collator that
``SFTTrainer`` makes takes its labels from the ``attention_mask``, if the two tokens are the same. A collator that the
user gives is the user's: ``DataCollatorForCompletionOnlyLM`` too, which warns by itself. A tokenizer that makes no
``attention_mask`` is out of reach.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge
from ..model import Outcome
from ..stubs import CharacterTokenizer, constructed, default_arguments, single_process, tiny_causal_lm


def learn_the_end(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the collator that the constructor makes tell padding by its place."""
    from transformers import DataCollatorForLanguageModeling

    wrapped(*args, **kwargs)
    collator = instance.data_collator
    # A subclass, or one that is given, is somebody's choice.
    if (
        argument(wrapped, args, kwargs, "data_collator") is not None
        or type(collator) is not DataCollatorForLanguageModeling
    ):
        return
    tokenizer = collator.tokenizer
    if not collator.mlm and tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        # No nested function and no other class: worker processes may have to pickle it.
        collator.torch_call = functools.partial(_labels_of_all_but_padding, collator)


def _labels_of_all_but_padding(collator: Any, examples: list[Any]) -> Any:
    """The collator's own batch, with labels ``(batch, length)`` that are -100 on the padding and nowhere else."""
    batch = type(collator).torch_call(collator, examples)
    if "attention_mask" in batch:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def ends_are_labels(module: ModuleType) -> Outcome:
    """How many ends are labels in a batch of two sequences, by the collator of a trainer that was given none."""
    if not getattr(module, "DataCollatorForLanguageModeling", module.SFTTrainer).__module__.startswith("transformers."):
        return absent("this release has a collator of its own, which knows padding by its place")
    words = CharacterTokenizer()
    words.pad_token, words.pad_token_id = words.eos_token, words.eos_token_id
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    given: dict[str, Any] = {"processing_class" if "processing_class" in parameters else "tokenizer": words}
    model = tiny_causal_lm(SimpleNamespace(_name_or_path="tiny", _attn_implementation="eager"))
    args = default_arguments(module.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, dataset_text_field="text")
    with single_process(module):
        trainer = constructed(module.SFTTrainer, model=model, args=args, **given)
    batch = trainer.data_collator([words(f"a{words.eos_token}"), words(f"abc{words.eos_token}")])
    ends = int((batch["labels"] == words.eos_token_id).sum())
    return judge(float(ends), right=2.0, wrong=0.0, labels=batch["labels"].tolist())
