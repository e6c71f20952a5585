"""Settings that change what a trainer is given, where ``Setting`` has no field for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .recipes import Make, Recipe
from .setting import CannotBeAskedError, Setting

Arguments = dict[str, Any]
Change = Callable[[Arguments, Path], None]
"""Changes the arguments of a trainer in place. The folder is for what is saved before."""

CHANGES: dict[str, Change] = {}
NEEDS: dict[str, str] = {}
"""What of TRL a change needs, which some releases lack."""


def is_change(name: str, *, needs: str = "") -> Callable[[Change], Change]:
    """Return a decorator that makes a function the change of this name. The key of an answer has its code."""

    def known(function: Change) -> Change:
        CHANGES[name] = function
        if needs:
            NEEDS[name] = needs
        return function

    return known


@dataclass(frozen=True)
class Changed(Setting):
    """A setting whose trainer gets changed arguments. ``change`` is a name of ``CHANGES``, or is empty."""

    change: str = ""

    def __str__(self) -> str:
        plain = Setting(**{each.name: getattr(self, each.name) for each in fields(Setting)})
        return f"{plain} and {self.change}" if self.change else str(plain)


def changed(setting: Setting, change: str) -> Changed:
    """Return this setting with a change."""
    return Changed(**{**{each.name: getattr(setting, each.name) for each in fields(Setting)}, "change": change})


def change_of(setting: Setting) -> str:
    """Return the name of the change of a setting, or nothing."""
    return setting.change if isinstance(setting, Changed) else ""


def applied(recipe: Recipe, make: Make) -> Make:
    """Return what makes trainers as ``make`` does, and changes what they are given.

    Only a trainer that a recipe of ours makes can be changed: of it, or of the user's subclass.
    """

    def made(setting: Setting, folder: Path) -> Any:
        if not change_of(setting):
            return make(setting, folder)
        return recipe.make(setting, folder, _changing(_class_of(recipe, make), setting, folder.parent))

    return made


def _class_of(recipe: Recipe, make: Make) -> Any:
    if isinstance(make, functools.partial):
        return make.keywords["trainer_class"]
    if make != recipe.make:
        raise CannotBeAskedError("your recipe does not say what its trainer is given")
    return recipe.classes()[0]


def _changing(trainer_class: Any, setting: Setting, folder: Path) -> Any:
    """Return a subclass whose arguments are changed before the trainer gets them."""

    def __init__(self: Any, **arguments: Any) -> None:
        CHANGES[change_of(setting)](arguments, folder)
        trainer_class.__init__(self, **arguments)

    return type(
        trainer_class.__name__, (trainer_class,), {"__init__": __init__, "__module__": trainer_class.__module__}
    )


def rows(arguments: Arguments, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change each row that is trained on."""
    from datasets import Dataset

    arguments["train_dataset"] = Dataset.from_list([change(dict(row)) for row in arguments["train_dataset"]])


def words_of(arguments: Arguments) -> Any:
    """Return the tokenizer, that of a processor too."""
    found = arguments.get("processing_class", arguments.get("tokenizer"))
    return getattr(found, "tokenizer", found)


def field(arguments: Arguments, name: str, value: Any) -> None:
    """Set a field of the config. Raises ``CannotBeAskedError`` where it has no field of this name."""
    args = arguments["args"]
    if name not in {each.name for each in dataclasses.fields(args)}:
        raise CannotBeAskedError(f"{type(args).__name__} has no {name}")
    setattr(args, name, value)
