"""The answer of a self-test."""

from __future__ import annotations

import math
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
