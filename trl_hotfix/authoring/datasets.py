"""What a dataset has before it is prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .calls import argument


def masks_prompts_of_messages(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call of SFT's ``_prepare_dataset`` keeps prompts that are messages out of the loss.

    Rows that are tokenised already have no such prompts. With a formatting function TRL refuses that loss.
    """
    from datasets import Dataset, IterableDataset

    dataset, settings = argument(wrapped, args, kwargs, "dataset"), argument(wrapped, args, kwargs, "args")
    if settings.completion_only_loss is False or not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    first = next(iter(dataset))
    return "input_ids" not in first and isinstance(first.get("prompt"), list)
