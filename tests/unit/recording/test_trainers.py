"""The trainer behind an event is the nearest on the stack."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from trl_hotfix.recording.trainers import calling_trainer


class Calling(Trainer):  # type: ignore[misc]
    def __init__(self) -> None: ...

    def event(self, inner: Any = calling_trainer) -> Any:
        return Handler().call(inner)


class Handler:
    """transformers calls its callbacks from an object that is no trainer."""

    def call(self, inner: Any) -> Any:
        return inner()


def test_it_is_the_nearest_whose_method_is_under_way() -> None:
    outer, inner = Calling(), Calling()
    assert calling_trainer() is None
    assert outer.event() is outer
    assert outer.event(inner.event) is inner
    assert Handler().call(calling_trainer) is None
