"""SFT trains and evaluates on rows that have no label left when they are cut at ``max_length``.

1.9.0 cuts the rows in ``_prepare_dataset``, and then drops those without a label (pull request 6320). Before:

- Up to 1.0.0rc1 ``truncate_dataset`` cuts all columns, and the collator makes labels of the masks.
- From 1.0.0 to 1.7.1 the collator cuts, unless it is without padding. From 1.7.0 on rows have labels before.
- 1.8.0 cuts them where 1.9.0 does.

The wrapper looks at the labels and masks of the rows that the method returns, and cuts them as the collator will. The
method has shuffled them, so with ``shuffle_dataset`` the rest has another order than in 1.9.0. Nobody knows what a
collator of the user's makes of the masks: then nothing is dropped. ``_prepare_dataset`` is not given the collator, so
the constructor's wrapper notes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, has_own_collator, judge, module_of, note_own_collator, only_rows, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, quick_sft_prepared


@wrapper
def note_the_collator(call: Call) -> None:
    """Make the trainer, and note before whether it is given a collator."""
    note_own_collator(call.__wrapped__, call.trainer, call.args, call.kwargs)
    call()


@wrapper
def drop_rows_without_a_label(call: Call) -> Any:
    """Prepare a dataset, and drop its rows that are masked as far as they are kept."""
    settings, packing, name = (call[parameter] for parameter in ("args", "packing", "dataset_name"))
    prepared, module = call(), module_of(call.__wrapped__)
    if packing or settings.max_length is None or not _masks_and_cuts(call.trainer, settings, module):
        return prepared
    masks = _masks(call.trainer, next(iter(prepared), {}), module)
    if not masks:
        return prepared
    keeps_the_end = getattr(settings, "truncation_mode", "keep_start") == "keep_end"
    kept = slice(-settings.max_length, None) if keeps_the_end else slice(settings.max_length)

    def is_trained(row: Any) -> bool:
        columns = ([value != -100 if mask == "labels" else value for value in row[mask][kept]] for mask in masks)
        return any(all(bits) for bits in zip(*columns, strict=False))

    return only_rows(module, prepared, is_trained, settings, f"Dropping rows without a label from {name} dataset")


def _masks_and_cuts(trainer: Any, settings: Any, module: ModuleType) -> bool:
    """Return whether this trainer's collator is TRL's, which masks, and its rows are cut at ``max_length``."""
    fields = module.DataCollatorForLanguageModeling.__dataclass_fields__
    if has_own_collator(trainer):
        return False
    # Without padding, 0.17 and 0.18 have the collator of transformers, and that of 1.0.0 to 1.7.1 does not cut.
    return not settings.padding_free or ("padding_free" in fields and "max_length" not in fields)


def _masks(trainer: Any, row: Mapping[str, Any], module: ModuleType) -> list[str]:
    """Return the columns that mark the tokens of ``row`` to train on. No column: all of them."""
    fields = module.DataCollatorForLanguageModeling.__dataclass_fields__
    if "padding_free" not in fields:  # 0.17 and 0.18 have no other mask, and do not read labels.
        names = ["completion_mask"] * trainer.completion_only_loss
    elif "completion_only_loss" in fields:
        names = ["labels", *["completion_mask"] * trainer.completion_only_loss, "assistant_masks"]
    else:  # From 1.7.0 on the labels are made of the masks.
        names = ["labels"]
    return [name for name in names if name in row]


def rows_have_a_label(module: ModuleType) -> Outcome:
    """Count the rows that are prepared of two. ``max_length`` leaves one of them a label. With the bug both stay."""
    fields = getattr(getattr(module, "DataCollatorForLanguageModeling", None), "__dataclass_fields__", {})
    if "completion_only_loss" not in fields and "padding_free" not in fields:
        return absent("there is no loss of the completion alone")
    # Its constructor may be that of the release before.
    prepare = inspect.unwrap(module.SFTTrainer._prepare_dataset)
    if "Dropping fully masked examples from " in prepare.__code__.co_consts:
        return absent("this release drops these rows itself")
    rows = [{"input_ids": [5, 6, 7], "completion_mask": mask} for mask in ([0, 0, 1], [0, 1, 1])]
    prepared = quick_sft_prepared(module, rows, CharacterTokenizer(), max_length=2, completion_only_loss=True)
    return judge(len(prepared), right=1, wrong=2)
