"""A trainer class with each kind of method, and layers to put on it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from trl_hotfix.model import Target, Wrapper
from trl_hotfix.patching.references import Reference
from trl_hotfix.patching.sites import Site, Sites
from trl_hotfix.patching.wrappers import Layer

MODULE = sys.modules[__name__]

asked_for: list[Reference] = []


def restore(reference: Reference) -> Any:
    """Stand in for ``restore`` of the engine: note what is asked for, and return what is there."""
    asked_for.append(reference)
    module, attribute, _ = reference
    return functools.reduce(getattr, attribute.split("."), sys.modules[module])


# Classes at the top of a module have instances that can be pickled.
class Base:
    def inherited(self, x: Any) -> Any:
        return x

    @classmethod
    def inherited_class_method(cls, x: Any) -> tuple[str, Any]:
        return cls.__name__, x


def times(number: int) -> Wrapper:
    def multiplying(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) * number

    return multiplying


class Trainer(Base):
    scale = 2

    def method(self, x: Any, *, times: int = 1) -> Any:
        """Multiply."""
        return x * self.scale * times

    @staticmethod
    def static(x: Any) -> Any:
        """Static."""
        return x * 3

    @classmethod
    def klass(cls, x: Any) -> Any:
        """Class."""
        return x * cls.scale

    async def coroutine(self, x: int) -> int:
        return x

    @property
    def prop(self) -> int:
        return 1

    number = 5


class Subclass(Trainer):
    scale = 7


RAW = dict(vars(Trainer))


def add(number: int) -> Wrapper:
    def adding(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) + number

    return adding


def layer(
    patch_id: str = "a-patch", wrapper: Wrapper | None = None, *, revision: int = 1, traced: bool = False
) -> Layer:
    return Layer(patch_id, revision, wrapper or add(100), traced)


def target(attribute: str) -> Target:
    return Target("trl.somewhere", attribute, "wrapper")


def site_of(attribute: str, owner: type = Trainer) -> Site:
    return Sites().at(sys.modules[__name__], target(f"{owner.__name__}.{attribute}"))


def new_module(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


UTILS = """
def pad(x, value=0):
    "Pad."
    return x + value

def caller(x):
    return pad(x)
"""
