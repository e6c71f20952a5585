"""What the user owns in a run, and where it stands."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

_LIBRARIES = ("trl", "transformers", "torch", "accelerate", "peft", "datasets", "trl_hotfix", "builtins")


def is_of_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _LIBRARIES


def class_of_trl(cls: type) -> Any:
    """Return the class of TRL that a trainer's class is, or inherits from; None for another."""
    return next((base for base in cls.__mro__ if f"{base.__module__}.".startswith("trl.")), None)


def is_trainer_of_trl(cls: type) -> bool:
    return class_of_trl(cls) is not None


def has_own_loop(cls: type) -> bool:
    """Return whether TRL's class has a training loop of its own, and does not call transformers' own."""
    of_trl = (base for base in cls.__mro__ if f"{base.__module__}.".startswith("trl."))
    loops = [vars(base)["train"] for base in of_trl if "train" in vars(base)]
    # Its code, since a wrapped one has another's source.
    return any("super" not in loop.__code__.co_names for loop in loops)


def own_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Give the methods of TRL's class that a user's class replaces, except its constructor."""
    of_trl = class_of_trl(cls)
    for base in cls.__mro__[: cls.__mro__.index(of_trl)]:
        for name, value in vars(base).items():
            if callable(value) and name not in ("__init__", "__new__") and hasattr(of_trl, name):
                yield name, value


def where(thing: Any) -> str:
    """Return where a function or a class of the user's stands, as ``train.py:31``."""
    made = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
    made = inspect.unwrap(made)
    code = getattr(made, "__code__", None)
    if code is not None:
        return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    try:
        return f"{os.path.basename(inspect.getfile(made))}:{inspect.getsourcelines(made)[1]}"
    # A class made at run time has no lines.
    except (OSError, TypeError):
        return str(getattr(made, "__module__", ""))


def described(thing: Any) -> str:
    """Return the name and the place of something of the user's."""
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return f"{name} ({where(thing)})"


def facts(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return what is the user's own in a trainer that begins to train, each with its place."""
    cls = type(trainer)
    of_trl = class_of_trl(cls)
    own: dict[str, Any] = {"class": "" if cls is of_trl else f"{cls.__qualname__} ({where(cls)})"}
    own["methods"] = {name: where(method) for name, method in own_methods(cls)} if cls is not of_trl else {}
    collator = trainer.data_collator
    made = collator if inspect.isfunction(collator) else type(collator)
    own["data_collator"] = "" if is_of_library(made) else described(collator)
    loss = given.get("compute_loss_func") or getattr(trainer, "compute_loss_func", None)
    own["compute_loss_func"] = described(loss) if loss is not None and not is_of_library(loss) else ""
    callbacks = [each for each in trainer.callback_handler.callbacks if not is_of_library(type(each))]
    own["callbacks"] = ", ".join(map(described, callbacks))
    return own
