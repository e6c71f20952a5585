"""Rows that a wrapper takes out of a dataset which TRL has prepared."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..by_identity import ByIdentity
from .calls import argument

_has_own_collator: ByIdentity[bool] = ByIdentity()


def note_own_collator(wrapped: Callable[..., Any], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note whether this call of a trainer's constructor is given a collator.

    A trainer prepares its datasets while it is made, and keeps no word of where its collator is from.
    """
    _has_own_collator[trainer] = argument(wrapped, args, kwargs, "data_collator") is not None


def has_own_collator(trainer: Any) -> bool:
    """Return whether it was noted that the trainer was given a collator."""
    return bool(_has_own_collator.get(trainer))


def only_rows(module: ModuleType, dataset: Any, keep: Callable[[Any], bool], settings: Any, doing: str) -> Any:
    """Return the rows of ``dataset`` for which ``keep(row)`` is true, or the dataset itself if all are.

    The main process goes first, as in this module's ``_prepare_dataset``, so that the others find the result in the
    cache: every rank must call this, unless the dataset is a stream, which is filtered when it is read. ``settings`` is
    the trainer's config, and ``doing`` the progress bar's name. ``keep`` should be a nested function: ``datasets``
    knows a function of a module by its name, and would take what an older release of the patch has cached.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return dataset.filter(keep)
    with module.PartialState().main_process_first():
        kept = dataset.filter(keep, num_proc=settings.dataset_num_proc, desc=doing)
    return dataset if len(kept) == len(dataset) else kept
