"""SFT has no use for the labels of rows that are tokenised already.

From 0.16.1 on the trainer has a collator of its own. ``torch_call`` takes the labels from ``input_ids``, and looks at
no column ``labels``. From 0.17.0 on ``_set_signature_columns_if_needed`` does not list that column, so that
``remove_unused_columns`` (on by default) drops it, and the collator of ``padding_free``, which would read it, lacks it.

Pull request 3589 lists it in 0.19.0, and lets the collator take it; a completion mask is applied to it as before. The
wrappers do so, too: what TRL has left out of the loss stays out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer

_IGNORED = -100


@wrapper
def keep_the_labels(call: Call) -> Any:
    """List the labels among the columns that the collator reads, if it is one that reads them."""
    from transformers import DataCollatorWithFlattening
    from trl.trainer import sft_trainer

    trainer = call.trainer
    columns_unset = trainer._signature_columns is None
    result = call()
    # Others may fail on labels that they have not been given so far.
    reading = (sft_trainer.DataCollatorForLanguageModeling, DataCollatorWithFlattening)
    if columns_unset and isinstance(trainer.data_collator, reading):
        trainer._signature_columns = [*trainer._signature_columns, "labels"]
        # A stream may not know its columns.
        if "labels" in (getattr(trainer.train_dataset, "column_names", None) or ()):
            call.act()
    return result


@wrapper
def train_on_the_labels(call: Call) -> Any:
    """Put the labels of the rows into the batch, except where TRL trains on nothing: the padding, and a prompt."""
    import torch

    batch, examples = call(), call["examples"]
    if "labels" not in examples[0]:
        return batch
    labels = torch.full_like(batch["labels"], _IGNORED)
    for example, row in zip(examples, labels, strict=True):
        given = torch.as_tensor(example["labels"])
        row[: len(given)] = given
    labels[batch["labels"] == _IGNORED] = _IGNORED
    return batch if torch.equal(labels, batch["labels"]) else {**batch, "labels": labels}


def labels_are_trained(module: ModuleType) -> Outcome:
    """Sum up the labels of a batch: of the tokens 5, 6 and 7, the first is not trained on, and 9 comes after 6.

    The batch is made of the columns that a trainer keeps, which are all in 0.16.1.
    """
    collator_class = module.DataCollatorForLanguageModeling
    if collator_class.__module__ != module.__name__:
        return absent("this release takes the collator of transformers")
    collator, row = collator_class(pad_token_id=0), {"input_ids": [5, 6, 7], "labels": [_IGNORED, 6, 9]}
    if "_set_signature_columns_if_needed" in vars(module.SFTTrainer):
        known = {"_is_vlm": False, "_is_vision_dataset": False, "_signature_columns": None, "train_dataset": None}
        args = default_arguments(module.SFTConfig)
        trainer = stub_trainer(module.SFTTrainer, args, data_collator=collator, **known)
        trainer._set_signature_columns_if_needed()
        row = {name: row[name] for name in row if name in trainer._signature_columns}
    return judge(int(collator([row])["labels"].clamp(min=0).sum()), right=6 + 9, wrong=5 + 6 + 7)
