"""A wrapper that fails in a call is switched off, and TRL's method goes on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest

from trl_hotfix.patching.guard import Guard


def method(batch: Any, scale: int = 1) -> Any:
    if batch == "bad":
        raise KeyError("TRL's own")
    return (batch, scale)


def guard(wrapper: Callable[..., Any], armed: bool = True) -> Guard:
    guarded = Guard("a-patch", wrapper)
    guarded.armed = armed
    return guarded


def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError("ours")


def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    raise RuntimeError("ours")


@pytest.mark.parametrize("wrapper", [before, after])
def test_a_failing_wrapper_returns_the_unpatched_result(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    guarded = guard(wrapper)
    for _ in range(3):
        assert guarded(method, None, ("batch",), {"scale": 2}) == ("batch", 2)
    assert str(guarded.broken) == "ours"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "a-patch failed in a call (RuntimeError: ours) and is NOT on any more" in record.getMessage()


def test_the_method_is_called_once_when_a_wrapper_fails_later() -> None:
    calls: list[Any] = []
    guard(after)(calls.append, None, ("batch",), {})
    assert calls == ["batch"]


def after_other_arguments(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped("other")
    raise RuntimeError("ours")


def twice(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    after(wrapped, instance, args, kwargs)


@pytest.mark.parametrize("wrapper", [after_other_arguments, twice])
def test_a_mixed_result_is_an_error_that_names_the_patch(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    guarded = guard(wrapper)
    with pytest.raises(RuntimeError, match="ours"):
        guarded(method, None, ("batch",), {})
    assert guarded.broken is None
    assert "TRL_HOTFIX_SKIP=a-patch" in caplog.text


def test_an_error_of_trl_is_raised_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def passes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    guarded = guard(passes)
    with pytest.raises(KeyError, match="TRL's own"):
        guarded(method, None, ("bad",), {})
    assert guarded.broken is None
    assert not caplog.records


def test_an_unarmed_guard_raises_the_error_of_the_wrapper() -> None:
    with pytest.raises(RuntimeError, match="ours"):
        guard(before, armed=False)(method, None, ("batch",), {})


def test_a_wrapper_sees_the_signature_and_the_name() -> None:
    described: list[Any] = []

    def looks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        described.extend([inspect.signature(wrapped), wrapped.__name__])
        return wrapped(*args, **kwargs)

    guard(looks)(method, None, ("batch",), {})
    assert described == [inspect.signature(method), "method"]


def test_interrupts_are_not_caught() -> None:
    def interrupted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard(interrupted)(method, None, ("batch",), {})
