"""Ask the user's rewards twice, with stand-ins for those that we cannot ask."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any


class Rewards:
    """Wraps reward functions. ``problems`` has why a stand-in is needed, by the number of the function."""

    def __init__(self, stand_ins: tuple[int, ...]) -> None:
        self._stand_ins = stand_ins
        self._problems: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._values: dict[int, set[float]] = {}

    def wrapped(self, functions: Any) -> Any:
        """Return the replacement of the argument ``reward_funcs``. A model stays a model."""
        if isinstance(functions, list):
            return [self._one(number, each) for number, each in enumerate(functions)]
        return self._one(0, functions)

    def problems(self) -> dict[int, tuple[str, str]]:
        """Return the name of each function that needs a stand-in, and why, by its number."""
        flat = {number: "gives every completion the same" for number, seen in self._values.items() if len(seen) < 2}
        # One of several may well be flat on answers from a table.
        alone = flat if len(flat) == len(self._names) else {}
        return {number: (self._names[number], why) for number, why in {**alone, **self._problems}.items()}

    def _one(self, number: int, function: Any) -> Any:
        if not inspect.isroutine(function) and not (callable(function) and not hasattr(function, "parameters")):
            return function
        name = getattr(function, "__name__", type(function).__name__)
        self._names[number] = name
        if number in self._stand_ins:
            return functools.wraps(function)(_stand_in) if hasattr(function, "__name__") else _stand_in
        if inspect.iscoroutinefunction(function):
            self._problems[number] = "is a coroutine"
            return _named(_stand_in, name)
        return _named(functools.partial(self._asked, number, function), name)

    def _asked(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen = self._values.setdefault(number, set())
        try:
            # A function may change the completions that it gets.
            other = function(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})
            rewards = function(*args, **kwargs)
            numbers = [float(each) for each in rewards if each is not None]
            again = [float(each) for each in other if each is not None]
        # A reward is the user's code, and may raise anything: it may ask a server.
        except Exception as error:  # noqa: BLE001
            self._problems[number] = f"fails: {type(error).__name__}: {error}"
            return _stand_in(*args, **kwargs)
        if numbers != again:
            self._problems[number] = "answers twice differently"
        seen.update(numbers)
        return rewards


def _copied(value: Any) -> Any:
    """Return a copy of rows; anything else, such as the state of the trainer, as it is."""
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value


def _named(function: Any, name: str) -> Any:
    def asked(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    asked.__name__ = name
    return asked


def _stand_in(*args: Any, **kwargs: Any) -> list[float]:
    """Return a number for each completion that depends on its text alone."""
    completions = kwargs.get("completions") or args[-1]
    texts = [one if isinstance(one, str) else str(one[0]["content"]) if one else "" for one in completions]
    return [sum(text.encode()) % 101 / 101 for text in texts]
