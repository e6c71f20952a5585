"""The arguments of a real trainer, by the names that ``hits`` in ``patches.yaml`` use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ..catalogue.conditions import UNSET, Argument, Kind
from ..matching.hits import TRAINER_ONLY_ARGUMENTS
from ..patching import given
from ..patching.given import LONGEST_LIST, described
from . import beginnings

_DEEPEST = 4
UNSEEN = Argument(Kind.UNKNOWN, reason="the constructor was not observed")


class TrainerArguments:
    """The arguments of a trainer: what its constructor got, else the fields of its config, else what it has."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._config: Any = getattr(trainer, "args", None)
        self._given = given.to(trainer)

    def find(self, name: str) -> Argument:
        """Return an argument; ``model.adapter_name`` is what the model, as it was given, has as its adapter's name.

        ``train.resume_from_checkpoint`` is True if this training resumed. It is known when training has begun.
        """
        name, _, part = name.partition(".")
        if name == "train":
            return self._resumed()
        argument = self._whole(name)
        if not part or argument.kind is Kind.UNKNOWN:
            return argument
        if argument.kind is Kind.UNSET or (argument.kind is Kind.LITERAL and name != "model"):
            return UNSET
        if name == "model":
            return self._of_model(part) if argument.kind is Kind.OBJECT else UNSET
        owner = getattr(self._config, name, None)
        owner = getattr(self._trainer, name, None) if owner is None else owner
        value = owner.get(part) if isinstance(owner, Mapping) else getattr(owner, part, None)
        return described(value) if value is not None else UNSET

    def _resumed(self) -> Argument:
        beginning = beginnings.of(self._trainer)
        if beginning is None:
            return beginnings.NOT_SEEN
        return Argument(Kind.LITERAL, True) if beginning.step > 0 else UNSET

    def _whole(self, name: str) -> Argument:
        if name == "callbacks":
            return described(self._trainer.callback_handler.callbacks)
        if name == "deepspeed" and getattr(self._trainer, "is_deepspeed_enabled", False):
            return Argument(Kind.OBJECT, made_by=("deepspeed",))
        argument = (self._given or {}).get(name, UNSET)
        if argument.kind is not Kind.UNSET and not (argument.kind is Kind.LITERAL and argument.value is None):
            return argument
        if hasattr(self._config, name):
            return self._field(name)
        if self._given is None and name in TRAINER_ONLY_ARGUMENTS:
            return self._by_attribute(name)
        return UNSET

    def _field(self, name: str) -> Argument:
        """Return a field of the config. It may have its default, and then it may as well not have been given."""
        value = getattr(self._config, name)
        argument = described(value)
        if _equal(value, self._default(name)):
            return UNSET if argument.kind is not Kind.LITERAL else _as_default(argument)
        return argument

    def _default(self, name: str) -> Any:
        config = self._config
        # GRPO and RLOO compute each of these from the other. What counts is the number of steps.
        if name == "steps_per_generation":
            return config.gradient_accumulation_steps
        if name == "generation_batch_size":
            return config.generation_batch_size
        fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
        for field in fields:
            if field.name == name:
                factory = field.default_factory
                return field.default if factory is dataclasses.MISSING else factory()
        return dataclasses.MISSING

    def _by_attribute(self, name: str) -> Argument:
        """Return an argument of a constructor that was not observed, where the trainer still tells it."""
        if name == "peft_config" and not _is_adapted(self._trainer.model):
            return UNSET
        if name in ("compute_loss_func", "eval_dataset") and getattr(self._trainer, name, UNSEEN) is None:
            return UNSET
        return UNSEEN

    def _of_model(self, part: str) -> Argument:
        model = self._trainer.model
        if part == "adapter_name":
            names = list(getattr(model, "peft_config", ()))
            return Argument(Kind.LITERAL, names[0]) if names else UNSET
        if part in ("dtype", "torch_dtype"):
            dtype = getattr(model, "dtype", None)
            return described(dtype) if dtype is not None else UNSET
        value = getattr(model, part, None)
        return described(value) if value is not None else UNSET


def _equal(value: Any, default: Any) -> bool:
    """Return whether a value is its default. Only plain values are compared: tensors would be, element by element."""
    return value is default or (_is_plain(value) and _is_plain(default) and bool(value == default))


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in (list, tuple, dict, set, frozenset):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        return len(parts) <= LONGEST_LIST and depth < _DEEPEST and all(_is_plain(part, depth + 1) for part in parts)
    return isinstance(value, Enum) or type(value) in (bool, int, float, str, bytes, type(None))


def _as_default(argument: Argument) -> Argument:
    return Argument(Kind.LITERAL, argument.value, is_default=True)


def _is_adapted(model: Any) -> bool:
    return any(cls.__module__.startswith("peft.") and "Mixin" not in cls.__name__ for cls in type(model).__mro__)
