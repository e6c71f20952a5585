"""The circuit breaker of a patch: an error in one of its wrappers switches all of them off, and does not end the run.

If the wrapper fails before it has called TRL's method, or after it has called it once with the very arguments that it
was given, the unpatched behaviour is still available: TRL runs unpatched from then on, with one warning. The result of
TRL's method for other arguments is neither the old behaviour nor the new one, so then the error is raised, after a log
line that names the patch. ``strict-all`` raises every error, unless there are other ranks, which have to end together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..call import Call, Wrapped
from ..errors import NotAppliedError, described_error
from ..log import HEARD, event, log, warning
from ..witness import Here


class Breaker:
    """One for each patch, shared by its wrappers. ``error`` describes the error that has switched them off.

    ``strict`` is asked at each error, since a later ``apply()`` may be strict.
    """

    __slots__ = ("_strict", "broken", "error", "patch_id")

    def __init__(self, patch_id: str, strict: Callable[[], bool] = bool) -> None:
        self.patch_id, self._strict = patch_id, strict
        self.broken = False
        self.error: str | None = None

    def opens(self, error: Exception, call: Call | Wrapped) -> bool:
        """Return whether ``error`` of a wrapper switches the patch off, so that the caller returns TRL's own result.

        If not, the caller is to raise the error. It must not be raised here: the frame of this function, which has the
        error in it, would keep the error and the batch alive.
        """
        if any(error is each for each in call.errors) or isinstance(error, NotAppliedError) or is_out_of_memory(error):
            return False  # This is TRL's own error, or one that the caller may handle.
        described = described_error(error)
        failure = f"{self.patch_id} failed in a call ({described})"
        fields = {**HEARD, **event("failed-in-call", patch=self.patch_id)}
        if call.errors or (call.calls and not call.is_unchanged()):
            log.error(
                "%s after TRL had done part of it; TRL_HOTFIX_SKIP=%s leaves it out",
                failure,
                self.patch_id,
                extra=fields,
            )
            return False
        if Here.thread.in_self_test:
            return True  # The self-test of another patch calls it with stand-ins, and must not switch it off for a run.
        if self._strict():
            log.error(
                "%s; strict mode raises it. TRL_HOTFIX_SKIP=%s leaves the patch out",
                failure,
                self.patch_id,
                extra=fields,
            )
            return False
        # Only text is kept: the error would keep the batch and the outputs of this step alive.
        self.broken, self.error = True, described
        warning("%s and is NOT on any more: from this call on TRL runs unpatched", failure, extra=fields)
        return True

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Leave the wrappers out in this block: TRL's own methods run."""
        before = self.broken, self.error
        self.broken = True
        try:
            yield
        finally:
            self.broken, self.error = before


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the caller may try again with a smaller batch, as accelerate's ``find_executable_batch_size``."""
    if isinstance(error, MemoryError) or "OutOfMemoryError" in (cls.__name__ for cls in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError) or not all(isinstance(argument, str) for argument in error.args):
        return False
    memory = sys.modules.get("accelerate.utils.memory")
    reduces = getattr(memory, "should_reduce_batch_size", None)
    return "out of memory" in str(error) or (reduces is not None and bool(reduces(error)))
