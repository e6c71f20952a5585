"""KTO on images estimates the KL term of a batch of one row with the completion that the row has itself.

Without images ``_prepare_dataset`` gives each row the completion of the row before it, in blocks of
``per_device_train_batch_size``, so evaluation may have any batch size. With images the collator gives each row that of
the row before it in the batch, and ``KTOTrainer`` refuses ``per_device_train_batch_size=1`` alone.

The collator does not know the dataset, so it keeps the last completion that it has seen, as an attribute, which goes
with it to the processes of a dataloader. An evaluation begins with the last row of its dataset.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterProcessor, messages, stub_trainer

_BEFORE = "_trl_hotfix_completion_before"


@wrapper
def take_the_completion_before(call: Call) -> Any:
    """Collate a single row a second time, with the completion of the row before it, for its KL term."""
    collator, examples = call.trainer, call["examples"]
    before, single = vars(collator).get(_BEFORE), {**examples[0]}
    setattr(collator, _BEFORE, examples[-1]["completion"])
    batch = call()
    if before is None or len(examples) > 1 or not collator.calculate_kl:
        return batch
    mismatched = call.with_(examples=[{**single, "completion": before}])()
    for name in [name for name in batch if name.startswith("KL_")]:
        own = name.removeprefix("KL_")  # Up to 1.7.1 KL_completion_token_type_ids has a longer prefix.
        batch[name] = mismatched[own if own in mismatched else own.removeprefix("completion_")]
    return batch


@wrapper
def begin_after_the_last_row(call: Call) -> Any:
    """Note the last row of this dataset, which the collator takes for the row before the first."""
    collator, dataset = call.trainer.data_collator, call["dataloader"].dataset
    if getattr(collator, "calculate_kl", False) and hasattr(dataset, "__len__"):
        setattr(collator, _BEFORE, dataset[len(dataset) - 1]["completion"])
    return call()


def a_single_row_has_another_completion(module: ModuleType) -> Outcome:
    """Evaluate two rows, one at a time, and count those whose KL completion is their own."""
    if not hasattr(module, "DataCollatorForVisionUnpairedPreference"):
        return absent("KTO of this release has no collator of images")
    collator = module.DataCollatorForVisionUnpairedPreference(CharacterProcessor(), calculate_kl=True)
    row = {"images": [7], "prompt": messages("uq"), "label": True}
    rows = [{**row, "completion": messages(f"a{text}")} for text in "bc"]
    trainer = stub_trainer(module.KTOTrainer, SimpleNamespace(), data_collator=collator)
    with suppress(AttributeError):  # There are no arguments, and the loop begins with one of them.
        trainer.evaluation_loop(SimpleNamespace(dataset=rows), "")
    batches = [collator([row]) for row in rows]
    ids = "input_ids" if "input_ids" in batches[0] else "completion_input_ids"
    return judge(sum(bool(batch[f"KL_{ids}"].equal(batch[ids])) for batch in batches), right=0, wrong=2)
