"""The function that says what a trainer is doing while one of its own methods runs. It is no patch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from ..errors import described_error
from ..log import event, warning
from ..witness import Here, Phase, doing, note_construction
from . import given


def in_phase(raw: FunctionType, phase: Phase) -> Callable[..., Any]:
    """Return a function that calls ``raw``, and what this thread does meanwhile is its instance in ``phase``.

    That of a constructor also notes what it is given, and what it has called.
    """

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        before = Here.thread.doing
        Here.thread.doing = doing(self, phase)
        try:
            return raw(self, *args, **kwargs)
        finally:
            Here.thread.doing = before

    def constructor(self: Any, /, *args: Any, **kwargs: Any) -> None:
        before = Here.thread.doing
        Here.thread.doing = doing(self, phase)
        _note_arguments(self, raw, args, kwargs)
        try:
            raw(self, *args, **kwargs)
        finally:
            Here.thread.doing = before
            note_construction(self)

    return constructor if phase is Phase.CONSTRUCT else method


def _note_arguments(trainer: Any, raw: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        given.note(trainer, raw, args, kwargs)
    # The arguments are objects of the program, which may raise anything, and must not keep its trainer from being made.
    except Exception as error:  # noqa: BLE001
        fields = event("not-noted")
        warning("we cannot note what a trainer is made with (%s)", described_error(error), extra=fields)
