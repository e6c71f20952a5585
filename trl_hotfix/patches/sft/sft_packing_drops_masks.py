"""With packing ``_prepare_dataset`` of SFT drops the masks that say which tokens are in the loss.

It packs the column ``input_ids`` alone (0.17.0 to 0.19.1). The collator reads the masks too, and trains on all tokens
where it finds none. Pull request 3749 (0.20.0) packs the masks beside the tokens.

The wrapper has TRL tokenise the dataset, and packs its tokens and masks with TRL's ``pack_dataset``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, quick_rows, single_process, stub_trainer

_PACKED = ("input_ids", "completion_mask", "assistant_masks")
"""What 0.20.0 packs of a tokenised row."""


@wrapper
def pack_the_masks(call: Call) -> Any:
    """Pack a dataset that has a mask, or gets one, with its masks."""
    from datasets import Dataset, IterableDataset

    dataset, settings = call["dataset"], call["args"]
    if not call["packing"] or settings.max_length is None or not isinstance(dataset, (Dataset, IterableDataset)):
        return call()
    if not _has_mask(call.trainer, settings, next(iter(dataset))):
        return call()
    with shadowed(settings, "max_length", None), shadowed(settings, "use_liger_kernel", False):
        tokenised = call.with_(packing=False)()
    # A stream may not know its columns.
    columns = [name for name in next(iter(tokenised)) if name in _PACKED]
    strategy = [settings.packing_strategy] if hasattr(settings, "packing_strategy") else []
    several = {"num_proc": settings.dataset_num_proc} if isinstance(tokenised, Dataset) else {}
    pack_dataset = module_of(call).pack_dataset
    return pack_dataset(tokenised.select_columns(columns), settings.max_length, *strategy, several)


def _has_mask(trainer: Any, settings: Any, row: Any) -> bool:
    """Return whether a dataset with this first row has a mask that the collator reads, or gets one.

    It reads those of assistants that a tokenised dataset has whatever the setting is, if there is such a setting.
    """
    if trainer.completion_only_loss and ("completion_mask" in row or ("prompt" in row and "input_ids" not in row)):
        return True
    assistant_only = getattr(settings, "assistant_only_loss", None)
    return assistant_only is not None and ("assistant_masks" in row or (assistant_only and "input_ids" not in row))


def masks_are_packed(module: ModuleType) -> Outcome:
    """Count the tokens that are trained of two packed rows of three, each with one token in its mask."""
    fields = getattr(module.SFTConfig, "__dataclass_fields__", {})
    if "completion_only_loss" not in fields:
        return absent("this release has no loss of completions alone")
    args = default_arguments(module.SFTConfig, max_length=6, shuffle_dataset=False, use_liger_kernel=False)
    trainer = stub_trainer(module.SFTTrainer, args, completion_only_loss=True, _is_vlm=False)
    rows = quick_rows([{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}] * 2)
    with single_process(module):
        (prepared,) = trainer._prepare_dataset(rows, None, args, True, None, "train")
    # Later releases turn the mask into labels.
    everything = [label != -100 for label in prepared.get("labels", prepared["input_ids"])]
    return judge(float(sum(prepared.get("completion_mask", everything))), right=2.0, wrong=6.0)
