"""Which defaults of a trainer's config change between two releases, as far as a script leaves them to TRL."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from msgspec import Struct

from ..catalogue.conditions import Kind
from ..matching.config_defaults import REQUIRED, Defaults
from .found import TrainerCall

OF_TRANSFORMERS = frozenset(
    {"average_tokens_across_devices", "bf16", "gradient_accumulation_steps", "gradient_checkpointing"}
    | {"ignore_data_skip", "learning_rate", "logging_steps", "lr_scheduler_kwargs", "lr_scheduler_type"}
    | {"max_grad_norm", "neftune_noise_alpha", "per_device_train_batch_size", "push_to_hub", "remove_unused_columns"}
    | {"run_name", "seed", "torch_empty_cache_steps", "train_sampling_strategy", "use_liger_kernel"}
)
"""Arguments that ``TrainingArguments`` has too. Where TRL does not define them, the default is transformers'."""

FROM_TRANSFORMERS = "that of transformers"

_SAME_IN_TRANSFORMERS = {"lr_scheduler_kwargs": "None", "torch_empty_cache_steps": "None", "use_liger_kernel": "False"}
"""Defaults that transformers and TRL have in common: TRL defines them only to document them."""


class Change(str, Enum):
    """What the other release changes for a script."""

    DEFAULT = "default"
    """The script does not set the argument, and has the other default."""

    MAY_BE_SET = "may be set"
    """The text does not settle if the script sets the argument; if not, it has the other default."""

    GONE = "gone"
    """The script sets the argument, and TRL's config does not define it any more."""

    NEW = "new"
    """The argument is new, and the script does not set it."""


class DefaultChange(Struct, frozen=True):
    """An argument, and its default in both releases as source text; None where TRL's config does not define it."""

    name: str
    change: Change
    before: str | None
    after: str | None
    line: int | None = None


def default_changes(call: TrainerCall, first: Defaults, second: Defaults) -> Iterator[DefaultChange]:
    """Yield what changes for a trainer call, by the names of the arguments."""
    for name in sorted({*first, *second}):
        before, after = (_default(defaults, name) for defaults in (first, second))
        if before == after:
            continue
        argument = call.argument(name)
        if argument.kind is Kind.UNSET:
            if after is not None and after != REQUIRED:
                change = Change.NEW if before is None else Change.DEFAULT
                yield DefaultChange(name, change, before, after)
        elif argument.kind is Kind.UNKNOWN:
            if before is not None and after is not None:
                yield DefaultChange(name, Change.MAY_BE_SET, before, after, argument.line)
        elif after is None:
            yield DefaultChange(name, Change.GONE, before, None, argument.line)


def _default(defaults: Defaults, name: str) -> str | None:
    of_transformers = _SAME_IN_TRANSFORMERS.get(name, FROM_TRANSFORMERS) if name in OF_TRANSFORMERS else None
    return defaults.get(name, of_transformers)
