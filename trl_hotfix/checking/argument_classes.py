"""The argument classes, such as SFTConfig: note what the user gives them, make it safe, and give it again.

A config computes fields from others when it is made. A copy with one field changed would keep these values. So a run
gets a new config of what the user gave, what he assigned later, and what the run changes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_GIVEN, _FIELDS = "_trl_hotfix_given", "_trl_hotfix_fields"

Make = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""Returns what a config is given, of what the user gives and the defaults of its fields."""


@dataclass
class Given:
    """What the user gave to a config.

    ``arguments`` go to the class that he calls, and ``fields`` what a class with an initializer of its own makes
    of them. ``made`` has the values of its fields when it was made.
    """

    arguments: dict[str, Any]
    fields: dict[str, Any]
    made: dict[str, Any]


class ArgumentClasses:
    """Notes each config of transformers and TRL, and makes it with what ``make`` returns."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.is_on = True
        self._level = 0
        self._seen: set[type] = set()

    def install(self) -> None:
        from transformers import TrainingArguments

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            for base in reversed(cls.__mro__):
                if issubclass(base, TrainingArguments) and "__init__" in vars(base) and base not in self._seen:
                    self._wrap(base)
            return object.__new__(cls)

        TrainingArguments.__new__ = staticmethod(new)

    def _wrap(self, cls: Any) -> None:
        self._seen.add(cls)
        original = cls.__init__
        signature = inspect.signature(original)
        is_generated = set(list(signature.parameters)[1:]) == defaults(cls).keys()

        @functools.wraps(original)
        def init(config: Any, *args: Any, **kwargs: Any) -> None:
            if not self.is_on:
                original(config, *args, **kwargs)
                return
            try:
                given = _by_name(signature, config, args, kwargs)
            except TypeError:
                # Python's own error names the class.
                original(config, *args, **kwargs)
                raise
            outermost = self._level == 0
            self._level += 1
            try:
                if is_generated:
                    vars(config).setdefault(_FIELDS, given)
                    original(config, **self.make(given, defaults(cls)))
                else:
                    # It gives the fields to its base itself.
                    original(config, *args, **kwargs)
            finally:
                self._level -= 1
            if outermost:
                fields = vars(config).pop(_FIELDS, given)
                made = {name: _kept(value) for name, value in vars(config).items()}
                vars(config)[_GIVEN] = Given(given, fields, made)

        cls.__init__ = init


def _by_name(
    signature: inspect.Signature, config: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    bound = signature.bind(config, *args, **kwargs).arguments
    for name, value in list(bound.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        else:
            given[name] = value
    return given


def defaults(cls: Any) -> dict[str, Any]:
    """Return the fields that a config class takes, with their defaults."""
    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(cls)
        if field.init
    }


def given_to(config: Any) -> dict[str, Any]:
    """Return what the user gave to a config, with what he assigned later."""
    given: Given | None = vars(config).get(_GIVEN)
    if given is None:
        return {name: getattr(config, name) for name in defaults(type(config)) if hasattr(config, name)}
    return {**given.fields, **assigned(config, given)}


def assigned(config: Any, given: Given) -> dict[str, Any]:
    """Return the fields that the user assigned after the config was made."""
    names = defaults(type(config))
    now = {name: value for name, value in vars(config).items() if name in names}
    return {name: value for name, value in now.items() if not _same(value, given.made.get(name))}


def made_again(config: Any) -> Any:
    """Return a new config of what the user gave, with what the run changes now."""
    given: Given | None = vars(config).get(_GIVEN)
    arguments, later = (given_to(config), {}) if given is None else (given.arguments, assigned(config, given))
    parameters = inspect.signature(type(config).__init__).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    taken = {name: value for name, value in later.items() if takes_all or name in parameters}
    again = type(config)(**{**arguments, **taken})
    # What it does not take was put there, and so was what is no field.
    others = {name: value for name, value in vars(config).items() if name not in vars(again) and name != _GIVEN}
    for name, value in {**{name: later[name] for name in later.keys() - taken.keys()}, **others}.items():
        setattr(again, name, value)
    return again


def _kept(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    plain = (bool, int, float, str, list, dict, tuple, set)
    return isinstance(one, plain) and isinstance(other, plain) and bool(one == other)
