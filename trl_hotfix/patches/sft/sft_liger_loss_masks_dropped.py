"""With the Liger kernel ``_prepare_dataset`` of SFT drops the masks that say which tokens are in the loss.

Its last line selects the columns that it takes for needed: ``input_ids`` (0.17 and 0.18), with ``position_ids`` (0.19),
or with ``seq_lengths`` and ``completion_mask`` (0.20 and 0.21). The collator reads the masks too, and what it does not
find it does not apply. Pull request 3674 added the one mask to this line, and 3914 the other.

The wrapper has the dataset prepared as without Liger, and selects the columns itself, the masks among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, single_process, stub_trainer

_READ_BY_COLLATOR = ("input_ids", "position_ids", "seq_lengths", "completion_mask", "assistant_masks")
"""What a collator of 0.17 to 0.21 may read of a prepared row; ``labels`` are dropped to this day."""


@wrapper
def keep_masks(call: Call) -> Any:
    """Keep the masks of completions and of assistants (0.17.0 to 0.19.1)."""

    def has_mask(settings: Any, row: Mapping[str, Any]) -> bool:
        is_pair = call.trainer.completion_only_loss and ("prompt" in row or "completion_mask" in row)
        return bool(is_pair) or _has_assistant_masks(settings, row)

    return _prepare(call, has_mask)


@wrapper
def keep_assistant_masks(call: Call) -> Any:
    """Keep the masks of assistants (0.20.0 and 0.21.0)."""
    return _prepare(call, _has_assistant_masks)


def _has_assistant_masks(settings: Any, row: Mapping[str, Any]) -> bool:
    """Return whether a dataset with this first row has masks of assistants, or gets them, and the collator reads them.

    It reads those that a tokenised dataset has, whatever the setting is; where there is no setting, it reads none.
    """
    assistant_only = getattr(settings, "assistant_only_loss", None)
    return assistant_only is not None and (assistant_only or "assistant_masks" in row)


def _prepare(call: Call, has_mask: Callable[[Any, Mapping[str, Any]], bool]) -> Any:
    """Prepare a dataset that has a mask, or gets one, without the last line of the method."""
    from datasets import Dataset, IterableDataset

    dataset, settings = call["dataset"], call["args"]
    if not settings.use_liger_kernel or not isinstance(dataset, (Dataset, IterableDataset)):
        return call()
    if not has_mask(settings, next(iter(dataset))):
        return call()
    with shadowed(settings, "use_liger_kernel", False):
        prepared = call()
    # A stream may not know its columns.
    return prepared.select_columns([name for name in next(iter(prepared)) if name in _READ_BY_COLLATOR])


def masks_are_kept(module: ModuleType) -> Outcome:
    """Count the tokens that are trained of a row of three, one of them in its mask, when Liger is on.

    Preparing a dataset takes no Liger. The row is tokenised already, so it takes no tokenizer either.
    """
    fields = getattr(module.SFTConfig, "__dataclass_fields__", {})
    if "completion_only_loss" not in fields:
        return absent("this release has no loss of completions alone")
    from datasets import IterableDataset

    class Row(IterableDataset):  # type: ignore[misc]
        """A dataset of one row. A real one takes ten times as long as all else."""

        def __init__(self, row: dict[str, Any]) -> None:
            self.row, self.names = row, list(row)

        column_names = property(lambda self: self.names)

        def __iter__(self) -> Any:
            return iter([self.row])

        def select_columns(self, names: Any) -> Row:
            chosen = {names} if isinstance(names, str) else set(names)
            return Row({name: value for name, value in self.row.items() if name in chosen})

        def map(self, function: Any, fn_kwargs: Any = None, remove_columns: Any = (), **kwargs: Any) -> Row:
            row = {**self.row, **function(self.row, **(fn_kwargs or {}))}
            return Row({name: value for name, value in row.items() if name not in remove_columns})

    # 0.19 drops both masks, the later releases only that of assistants.
    mask = "assistant_masks" if "assistant_only_loss" in fields else "completion_mask"
    args = default_arguments(module.SFTConfig, max_length=None, shuffle_dataset=False, use_liger_kernel=True)
    trainer = stub_trainer(module.SFTTrainer, args, completion_only_loss=True, _is_vlm=False)
    with single_process(module):
        row = Row({"input_ids": [5, 6, 7], mask: [0, 0, 1]})
        (prepared,) = trainer._prepare_dataset(row, None, args, False, None, "train")
    # Later releases turn the mask into labels.
    trained = prepared.get(mask) or [label != -100 for label in prepared.get("labels", prepared["input_ids"])]
    return judge(float(sum(trained)), right=1.0, wrong=3.0)
