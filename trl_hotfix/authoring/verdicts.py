"""The answer of a self-test."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..model import Outcome, Verdict


def judge(measured: float, *, right: float, wrong: float, **numbers: Any) -> Outcome:
    """Return ``fixed`` if ``measured`` is the formula's value, and ``reproduced`` if it is the bug's.

    Any other value is an ``AssertionError``: the self-test does not understand this release. ``numbers`` are reported
    as well.
    """
    measurements = {"measured": measured, "right": right, "wrong": wrong, **numbers}
    if math.isclose(measured, right, rel_tol=1e-5, abs_tol=1e-6):
        return Outcome(Verdict.FIXED, measurements)
    if math.isclose(measured, wrong, rel_tol=1e-5, abs_tol=1e-6):
        return Outcome(Verdict.REPRODUCED, measurements)
    raise AssertionError(f"measured {measured!r}: neither right ({right!r}) nor the known wrong ({wrong!r})")


def absent(why: str) -> Outcome:
    """Return that the bug cannot show in this release, with the reason."""
    return Outcome(Verdict.ABSENT, {"why": why})


def absent_on(
    error: type[Exception], text: str, why: str
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Let a self-test answer ``absent(why)`` where TRL raises this error, and ``text`` is part of its message.

    It is for a release that fails before it reaches the bug. Any other error is raised.
    """

    def decorate(self_test: Callable[..., Outcome]) -> Callable[..., Outcome]:
        @functools.wraps(self_test)
        def answer(*args: Any, **kwargs: Any) -> Outcome:
            try:
                return self_test(*args, **kwargs)
            except error as raised:
                if text not in str(raised):
                    raise
                return absent(why)

        return answer

    return decorate
