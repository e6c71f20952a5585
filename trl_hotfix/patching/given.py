"""What the constructors of trainers got. It keeps only descriptions, and holds trainers weakly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from ..by_identity import ByIdentity
from ..catalogue.conditions import UNSET, Argument, Kind
from ..matching.dataset_facts import GivenDataset
from . import given_datasets

_given: ByIdentity[Mapping[str, Argument]] = ByIdentity()
_datasets: ByIdentity[GivenDataset] = ByIdentity()

LONGEST_LIST = 100
"""A list with more elements is not looked into: it may be a dataset."""

_DEEPEST = 3
"""So many lists in one another are looked into. A list may contain itself."""


def note(trainer: Any, constructor: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Describe the arguments of a constructor that is about to run. A base class that gets others comes later."""
    if to(trainer) is not None:
        return
    signature = inspect.signature(constructor)
    bound = signature.bind_partial(trainer, *args, **kwargs).arguments
    given: dict[str, Argument] = dict.fromkeys(list(signature.parameters)[1:], UNSET)
    for name, value in list(bound.items())[1:]:
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        for key, part in value.items() if is_rest else [(name, value)]:
            given[key] = described(part)
            dataset = given_datasets.described(part) if key == "train_dataset" else None
            if dataset is not None:
                _datasets[trainer] = dataset
    _given[trainer] = given


def to(trainer: Any) -> Mapping[str, Argument] | None:
    """Return the arguments that the constructor of ``trainer`` got, or None if we did not observe it."""
    return _given.get(trainer)


def dataset_of(trainer: Any) -> GivenDataset | None:
    """Return what the training dataset of ``trainer`` was, or None if we did not observe it or do not know it."""
    return _datasets.get(trainer)


def described(value: Any, depth: int = 0) -> Argument:
    """Return a value as the argument that a condition is evaluated on. It reads no element of a tensor or dataset."""
    if isinstance(value, Enum) and isinstance(value.value, str):
        value = value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return Argument(Kind.LITERAL, value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return Argument(Kind.LITERAL, str(value).rpartition(".")[2])
    if isinstance(value, (list, tuple, set)):
        if len(value) > LONGEST_LIST or depth == _DEEPEST:
            return Argument(Kind.OBJECT, made_by=_made_by(type(value)), complete=False)
        parts = [described(part, depth + 1) for part in value]
        if all(part.kind is Kind.LITERAL for part in parts):
            return Argument(Kind.LITERAL, [part.value for part in parts])
        complete = all(part.complete for part in parts)
        return Argument(Kind.OBJECT, made_by=tuple(name for part in parts for name in part.made_by), complete=complete)
    return Argument(Kind.OBJECT, made_by=_made_by(value if isinstance(value, type) else type(value)))


def _made_by(cls: type) -> tuple[str, ...]:
    """Return the names of a class and of its bases: a subclass of a callback is that callback too."""
    # A model of transformers has PeftAdapterMixin among its bases, and is no adapter.
    named = [base for base in cls.__mro__ if base is not object and not base.__name__.endswith("Mixin")]
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in named)
