"""Run a self-test within a time limit and without side effects in the process."""

from __future__ import annotations

import reprlib
import traceback
from contextvars import copy_context
from types import ModuleType

from .. import witness
from ..catalogue import modules
from ..model import Decision, Options, Outcome, Patch, Reason, State
from . import exits
from .isolation import TimeLimitExceeded, time_limit, undisturbed

SELF_TEST_SECONDS = 60.0
"""A self-test takes milliseconds, but the first in a process may have to import modules from a slow disk."""


def self_test(patch: Patch, module: ModuleType, options: Options) -> Outcome | Decision:
    """Return the outcome of the self-test of ``patch`` on ``module``, or ``failed`` with the traceback if it raises.

    A ``KeyboardInterrupt``, and a ``SystemExit`` that is not of the self-test, are raised.
    """
    function = modules.function_of(patch, patch.self_test, options)
    try:
        with time_limit(SELF_TEST_SECONDS), undisturbed(), witness.apart():
            # Context variables that it sets, such as those of numpy and decimal, stay in this copy.
            outcome = copy_context().run(function, module)
    # A self-test that raises gives no verdict, and must not end the user's import.
    except (Exception, TimeLimitExceeded) as error:
        return failed(Reason.SELF_TEST_ERROR, error)
    except SystemExit as error:
        if not exits.is_of_self_test(error, function):
            raise
        return failed(Reason.SELF_TEST_ERROR, error)
    if not isinstance(outcome, Outcome):
        return Decision(
            State.FAILED, Reason.SELF_TEST_ERROR, {"error": f"the self-test returned {reprlib.repr(outcome)}"}
        )
    return outcome


def failed(reason: Reason, error: BaseException) -> Decision:
    """Return the decision of a patch that has raised ``error``, inside its handler."""
    message = str(error) or f"no answer within {SELF_TEST_SECONDS:g} s"
    evidence = {"error": f"{type(error).__name__}: {message}", "traceback": traceback.format_exc()}
    return Decision(State.FAILED, reason, evidence)
