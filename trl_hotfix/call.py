"""One call of a patched method: what its wrapper gets, and what the witness asks when the wrapper is done.

A wrapper that is marked with ``@wrapper`` takes one ``Call``. One without the mark takes wrapt's four arguments; the
first of them is a ``Wrapped``. Both know whether TRL's method was called, with what, and what it returned.

A wrapper acts if it hands on other arguments than it got, returns another result than TRL's method, or says
``call.act()``. One that asks for ``call.act_later()`` acts if it calls that, and not otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from inspect import Parameter
from operator import is_
from typing import Any, ClassVar, Protocol, TypeVar

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""

_AnyWrapper = TypeVar("_AnyWrapper", bound=Callable[..., Any])


def wrapper(function: _AnyWrapper) -> _AnyWrapper:
    """Mark a wrapper that takes a ``Call``, and in a patch with options also ``options=``."""
    function.takes_call = True  # type: ignore[attr-defined]
    return function


class Acted(Protocol):
    """What counts the acts: a count of the witness. ``unseen`` are the calls whose mark has seen nothing yet."""

    acted: int
    unseen: int

    def of_copy(self) -> Acted:
        """Return the count of what a copy of this trainer does now."""


class Parameters:
    """The parameters of a method without its instance, read when a wrapper first asks for an argument."""

    __slots__ = ("_by_name", "_method")

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._by_name: dict[str, tuple[int, Parameter]] | None = None

    def argument(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
        """Return the argument ``name`` of a call with these arguments, or its default.

        Raises ``KeyError`` if the method has no such parameter, ``TypeError`` if it was not given and has no default.
        """
        position, parameter = self._place(name)
        kind = parameter.kind
        if kind is Parameter.VAR_POSITIONAL:
            return args[position:]
        if kind is Parameter.VAR_KEYWORD:
            return {key: value for key, value in kwargs.items() if not self._takes_by_name(key)}
        if position < len(args) and kind is not Parameter.KEYWORD_ONLY:
            return args[position]
        if name in kwargs and kind is not Parameter.POSITIONAL_ONLY:
            return kwargs[name]
        if parameter.default is Parameter.empty:
            raise TypeError(f"this call of {_name(self._method)} lacks the argument {name!r}, which has no default")
        return parameter.default

    def replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Mapping[str, Any]) -> Arguments:
        """Return the arguments with the ``changed`` ones in them, passed as they were. Raises ``KeyError``."""
        kwargs = kwargs.copy()
        for name, value in changed.items():
            position, parameter = self._place(name)
            kind = parameter.kind
            if kind is Parameter.VAR_POSITIONAL:
                args = (*args[:position], *value)
            elif kind is Parameter.VAR_KEYWORD:
                kwargs = {**{key: kwargs[key] for key in kwargs if self._takes_by_name(key)}, **value}
            elif position < len(args) and kind is not Parameter.KEYWORD_ONLY:
                args = (*args[:position], value, *args[position + 1 :])
            elif kind is Parameter.POSITIONAL_ONLY:
                # The ones before it that were not given have defaults, or TRL's method would not take the call.
                before = list(self._places())[len(args) : position]
                args = (*args, *(self.argument(args, kwargs, each) for each in before), value)
            else:
                kwargs[name] = value
        return args, kwargs

    def read(self) -> None:
        """Read the signature now: compiled code cannot."""
        self._places()

    def _takes_by_name(self, name: str) -> bool:
        known = self._places().get(name)
        return known is not None and known[1].kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

    def _place(self, name: str) -> tuple[int, Parameter]:
        by_name = self._places()
        if name not in by_name:
            parameters = ", ".join(by_name) or "none"
            raise KeyError(f"{_name(self._method)} has no parameter {name!r}; it has: {parameters}")
        return by_name[name]

    def _places(self) -> dict[str, tuple[int, Parameter]]:
        if self._by_name is None:
            parameters = inspect.signature(self._method).parameters
            self._by_name = {name: (index, parameter) for index, (name, parameter) in enumerate(parameters.items())}
        return self._by_name


def parameters_of_method(raw: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function of a class, without the instance that it is called on."""
    return Parameters(partial(raw, None))


_NOTHING: dict[str, Any] = {}
"""No arguments by name. It is never changed."""


class _UnderWay:
    """What the witness asks of a call, in whatever form a wrapper gets it."""

    # Attributes of the class until they are set, since each that is set takes time in every call. So would a
    # ``__getattr__`` for the other attributes of the method.
    calls = 0
    result: Any = None
    errors: tuple[BaseException, ...] = ()
    """Those of TRL's method. The layer forgets them: they have the frame of this call, and so the batch."""
    handed: Any = None
    handed_by_name = _NOTHING
    acted = changed = False
    later: Mark | None = None
    current: ClassVar[ContextVar[_UnderWay | None]] = ContextVar("trl_hotfix_call", default=None)
    """The innermost call of a wrapper that is under way in this thread.

    It is an attribute of the class, and no global, since `dill` pickles a function of ours with its globals.
    """
    after_its_end: Any = ()
    """Its arguments then. Whatever keeps the call, such as a hook, must not keep the batch."""

    def __init__(
        self,
        method: Callable[..., Any],
        trainer: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] = _NOTHING,
        parameters: Parameters | None = None,
    ) -> None:
        self.__wrapped__ = method
        self.trainer = trainer
        self.args: Any = args
        self.kwargs = kwargs
        self._parameters = parameters

    @property
    def __name__(self) -> str:
        return str(self.__wrapped__.__name__)

    @property
    def __self__(self) -> Any:
        return self.__wrapped__.__self__  # type: ignore[attr-defined]

    @property
    def __func__(self) -> Any:
        return self.__wrapped__.__func__  # type: ignore[attr-defined]

    def made_with(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call TRL's method, and remember the call, what it returned and what it raised."""
        self.calls += 1
        try:
            result = self.result = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            self.errors += (error,)
            raise
        return result

    def is_unchanged(self) -> bool:
        """Return whether TRL's method was called once, with the very objects that its caller gave."""
        return self.calls == 1 and not self.changed

    def act(self) -> None:
        """Say that the wrapper acts in this call.

        It is for a wrapper that changes an object in place, or what TRL's method does by other means than arguments.
        """
        self.acted = True

    def act_later(self) -> Mark:
        """Return the ``act`` of this call for what is called later: a hook, a view, a transform.

        It alone says whether this call acts. The wrapper hands on what it is for in every call, also where it finds
        nothing.
        """
        if self.later is None:
            self.later = Mark()
        return self.later

    def end(self, count: Acted, result: Any) -> None:
        """Count the call if its wrapper, which has returned ``result``, has acted. Keep nothing of the batch."""
        if self.later is not None:
            acted = self.later.end(count)
        elif result is self.result or _same(self.result, result):
            acted = self.acted or bool(self.errors) or not self.is_unchanged()
        else:
            acted = True
        if acted:
            count.acted += 1
        self.args = self.after_its_end
        self.kwargs = self.handed_by_name = _NOTHING
        self.handed = self.result = None


class _Ended:
    """The arguments of a call that has ended."""

    def __iter__(self) -> Any:
        raise RuntimeError("this call has ended, and its arguments are gone: read what is needed later while it runs")

    __len__ = __iter__


class Call(_UnderWay):
    """One call of TRL's method: ``call()`` makes it as it came, and returns its result.

    ``call["model"]`` is an argument, however it was passed, or its default. ``call.with_(model=other)()`` makes the
    call with another one. An unknown name is a ``KeyError`` that lists the parameters. ``call.trainer`` is the object
    whose method it is: a trainer, a collator, a callback; None for a function. Once the wrapper has returned, the call
    has no arguments any more, and ``call()`` is a ``RuntimeError``.
    """

    after_its_end = _Ended()

    def __reduce__(self) -> Any:
        return Call, (self.__wrapped__, self.trainer, self.args, self.kwargs)

    def __call__(self) -> Any:
        return self.made_with(self.args, self.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.parameters.argument(self.args, self.kwargs, name)

    def with_(self, /, **changed: Any) -> Changed:
        """Return this call with other arguments, to be made by ``()``. Raises ``KeyError``."""
        return Changed(self, self.args, self.kwargs, is_changed=False).with_(**changed)

    @property
    def is_training(self) -> bool:
        """Whether the trainer's model is in training mode, which is what TRL asks."""
        return bool(self.trainer.model.training)

    @property
    def parameters(self) -> Parameters:
        if self._parameters is None:
            self._parameters = Parameters(self.__wrapped__)
        return self._parameters


class Changed:
    """A call with other arguments: ``()`` makes it, ``[name]`` is an argument of it."""

    __slots__ = ("_args", "_call", "_is_changed", "_kwargs")

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_changed: bool) -> None:
        self._call, self._args, self._kwargs, self._is_changed = call, args, kwargs, is_changed

    def __call__(self) -> Any:
        self._call.changed = self._call.changed or self._is_changed
        return self._call.made_with(self._args, self._kwargs)

    def __getitem__(self, name: str) -> Any:
        return self._call.parameters.argument(self._args, self._kwargs, name)

    def with_(self, /, **changed: Any) -> Changed:
        """Return this call with further arguments changed. Raises ``KeyError``."""
        args, kwargs = self._call.parameters.replaced(self._args, self._kwargs, changed)
        is_changed = any(self[name] is not value for name, value in changed.items())
        return Changed(self._call, args, kwargs, is_changed=self._is_changed or is_changed)


class Wrapped(_UnderWay):
    """TRL's method as a wrapper with wrapt's four arguments gets it.

    A pickle of it, by which `datasets` hashes what a wrapper hands on, has the method and nothing of the call.
    """

    def __reduce__(self) -> Any:
        return Wrapped, (self.__wrapped__,)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.handed, self.handed_by_name = args, kwargs
        # As `made_with`, which would make each call of most wrappers a tenth longer.
        try:
            result = self.result = self.__wrapped__(*args, **kwargs)
        except BaseException as error:
            self.errors += (error,)
            raise
        return result

    def is_unchanged(self) -> bool:
        """Return whether TRL's method was called once, with the very objects that its caller gave."""
        args, kwargs, given = self.handed, self.handed_by_name, self.kwargs
        if self.calls != 1 or len(args) != len(self.args) or len(kwargs) != len(given):
            return False
        # Loops take half the time of all() with map() or a generator.
        for handed, was in zip(args, self.args):  # noqa: B905
            if handed is not was:
                return False
        for name in given:  # noqa: SIM110
            if kwargs.get(name, _MISSING) is not given[name]:
                return False
        return True


def takes_call(function: Callable[..., Any]) -> bool:
    """Return whether a wrapper is marked with ``@wrapper``. With options it is a partial function."""
    return getattr(getattr(function, "func", function), "takes_call", False)


_MISSING = object()


def _name(method: Callable[..., Any]) -> str:
    function = method.func if isinstance(method, partial) else method
    return str(getattr(function, "__qualname__", function))


def _same(before: Any, after: Any) -> bool:
    """Return whether a result is a new tuple or dictionary of the same objects as TRL's own."""
    if type(before) is type(after) is tuple:
        return len(before) == len(after) and all(map(is_, before, after))
    if type(before) is type(after) is dict:
        return list(before) == list(after) and all(map(is_, before.values(), after.values()))
    return False


class Mark:
    """The ``act`` of one call, also after its end. It keeps nothing of the call, and a pickle of it counts nothing."""

    __slots__ = ("_acted", "_count", "_of_original", "_saw")

    def __init__(self) -> None:
        self._acted = self._saw = False
        self._count: Acted | None = None
        self._of_original: Acted | None = None

    def __call__(self) -> None:
        if self._of_original is not None:
            self._count, self._of_original = self._of_original.of_copy(), None
        if not self._acted and self._count is not None:
            self._count.acted += 1
        self._acted = True
        self.saw()

    def saw(self) -> None:
        """Say that it has seen what it is for, such as a row: without an act there was nothing to do.

        What prepares data may run in other processes, or not at all if a cache has the result.
        """
        if not self._saw and self._count is not None:
            self._count.unseen -= 1
        self._saw = True

    def end(self, count: Acted) -> bool:
        """Return whether the call, which ends now, has acted. From now on ``count`` counts it."""
        self._count = count
        count.unseen += not self._saw
        return self._acted

    def __deepcopy__(self, memo: Any) -> Mark:
        # A copy of a trainer goes on with what its original had, and counts for itself.
        copied = Mark()
        copied._of_original, copied._saw = self._count or self._of_original, True
        return copied

    def __reduce__(self) -> Any:
        # `datasets` hashes pickles. A count would make each hash another one.
        return Mark, ()


def act() -> None:
    """Say that the wrapper from which this is called acts in this call. Outside a call of a wrapper nothing happens."""
    call = _UnderWay.current.get()
    if call is not None:
        call.act()


def act_of_this_call() -> Mark:
    """Return the ``act`` of this call of the wrapper, for what is called later, as ``Call.act_later``."""
    call = _UnderWay.current.get()
    return Mark() if call is None else call.act_later()


NOT_TRACED: tuple[Callable[..., Any], ...] = (_UnderWay.end, act, act_of_this_call)
"""What Dynamo has nothing to do with."""
