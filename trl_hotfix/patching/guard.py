"""Guard a proven wrapper, so that an error in it does not end the run.

If the wrapper fails before it has called TRL's method, or after it has called it once with the very arguments that it
was given, the unpatched behaviour is still available: TRL runs unpatched from then on, with one warning. The result of
TRL's method for other arguments is neither the old behaviour nor the new one, so then the error is raised, after a log
line that names the patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..log import log
from ..model import Wrapper


class Guard:
    """The wrapper of one patch. It is ``armed`` once it is proven; ``broken`` is the error that has switched it off."""

    __slots__ = ("armed", "broken", "patch_id", "wrapper")

    def __init__(self, patch_id: str, wrapper: Wrapper) -> None:
        self.patch_id, self.wrapper = patch_id, wrapper
        self.armed = False
        self.broken: Exception | None = None

    def __call__(
        self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.broken is not None:
            return wrapped(*args, **kwargs)
        if not self.armed:
            return self.wrapper(wrapped, instance, args, kwargs)
        recorder = _CallRecorder(wrapped)
        try:
            return self.wrapper(recorder, instance, args, kwargs)
        # The run can go on without the wrapper, so an error in the wrapper must not end it.
        except Exception as error:
            if recorder.raised:
                raise  # This is TRL's own error, or one of the user's code that TRL calls.
            failure = f"{self.patch_id} failed in a call ({type(error).__name__}: {error})"
            if not recorder.unchanged(args, kwargs):
                log.error("%s after TRL had done part of it; TRL_HOTFIX_SKIP=%s leaves it out", failure, self.patch_id)
                raise
            self.broken = error
            log.warning("%s and is NOT on any more: from this call on TRL runs unpatched", failure)
            return recorder.result if recorder.calls else wrapped(*args, **kwargs)


class _CallRecorder:
    """TRL's method as it is passed to a wrapper. It records the arguments and the result of each call."""

    # This class has no __slots__. If the caller is compiled, Dynamo traces it, and in a class with slots and a
    # ``__getattr__`` Dynamo does not find the slots and calls ``__getattr__`` without end.

    def __init__(self, wrapped: Callable[..., Any]) -> None:
        self.__wrapped__ = wrapped
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.raised = False
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        try:
            self.result = self.__wrapped__(*args, **kwargs)
        except BaseException:
            self.raised = True
            raise
        return self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the method was called never, or once with these very objects."""
        if len(self.calls) != 1:
            return not self.calls
        called_args, called_kwargs = self.calls[0]
        if len(called_args) != len(args) or called_kwargs.keys() != kwargs.keys():
            return False
        if not all(called is argument for called, argument in zip(called_args, args, strict=True)):
            return False
        return all(called_kwargs[key] is kwargs[key] for key in kwargs)
