"""Build the plain function that replaces a target and calls the wrappers of its patches."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..call import NOT_TRACED, Call, Parameters, Wrapped, parameters_of_method, takes_call
from ..model import Wrapper
from ..witness import Doing, Here, Phase, Witnessed, elsewhere
from . import references
from .breaker import Breaker
from .in_phase import in_phase
from .inheritance import Aside, forwarding, leaves_to_a_base
from .observing import is_compiling, observing
from .references import Reference


class UnsupportedTargetError(TypeError):
    """The target is not a function, so there is nothing to wrap."""


@dataclass(slots=True)
class Layer:
    """One patch's wrapper on a site, in either form.

    It is ``armed`` once it is proven; before that an error in it is raised.
    With ``observe`` the layer does not call the wrapper: it counts the calls of TRL's method and changes nothing. One
    with
    a ``phase`` is of no patch: it says what the trainer does. It is always the outermost.
    """

    patch_id: str
    revision: int
    wrapper: Callable[..., Any]
    traced: bool
    options: tuple[tuple[str, str], ...] = ()
    breaker: Breaker = field(default_factory=lambda: Breaker("a wrapper", lambda: True))
    witnessed: Witnessed = field(default_factory=lambda: Witnessed("", "", 0))
    armed: bool = False
    observe: bool = False
    phase: Phase | None = None


def wrapped_descriptor(
    raw: Any, layers: tuple[Layer, ...], owner: Any, path: tuple[str, str], *, inherited: bool = False
) -> Any:
    """Return the replacement of the descriptor ``raw``, with the last layer outermost.

    ``path`` is its module and attribute, ``inherited`` whether ``owner`` has it from a base. Raises
    ``UnsupportedTargetError``.
    """
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    if not isinstance(function, FunctionType):
        raise UnsupportedTargetError(f"{'.'.join(path)} is {describe(raw)}, not a function")
    traced = any(layer.traced for layer in layers)
    name = path[1].rpartition(".")[2]
    if inherited:
        function = forwarding(owner, name, raw)
        if not traced:
            _keep_from_dynamo(function)
    bound = isinstance(owner, type) and not isinstance(raw, staticmethod)
    # A trainer is counted by itself. Of a data collator or a callback there may be many, and they come and go.
    of_trainer = any(cls.__name__ == "Trainer" for cls in getattr(owner, "__mro__", ()))
    in_process = isinstance(raw, classmethod) or not of_trainer
    for layer in layers:
        aside = leaves_to_a_base(owner, name, layer.patch_id) if inherited and bound else None
        function = _layered(function, layer, bound=bound, traced=traced, in_process=in_process, aside=aside)
    repairing = tuple(
        (layer.patch_id, layer.revision, layer.options) for layer in layers if not layer.observe and layer.phase is None
    )
    _CODES.add(function.__code__)
    # Under TRL's own name its pickles, and so the hashes of `datasets`, would be those of the unpatched function.
    if repairing:
        function.__module__, function.__qualname__ = references.MODULE, references.name_of((*path, repairing))
    elif inherited or isinstance(owner, ModuleType):
        # What is inherited, or imported by name, is not found under its own name: it would be pickled with its code and
        # its counts, which are others each time.
        function.__module__, function.__qualname__ = path
    return function if isinstance(raw, FunctionType) else type(raw)(function)


_CODES: set[CodeType] = set()
"""The code of the functions that stand on targets."""


def reference_of(function: Any) -> Reference | None:
    """Return the patches that stand on this function, bound or not, or None if it is not ours."""
    function = getattr(function, "__func__", function)
    # ``functools.wraps`` copies the names of a function, and not its code.
    if (
        type(function) is not FunctionType
        or function.__code__ not in _CODES
        or function.__module__ != references.MODULE
    ):
        return None
    return references.parsed(function.__qualname__)


def _layered(
    raw: FunctionType, layer: Layer, *, bound: bool, traced: bool, in_process: bool, aside: Aside | None
) -> FunctionType:
    """Return a plain function that calls the wrapper of ``layer`` around ``raw``, and counts the calls."""
    if layer.phase is not None:
        plain = _plain(in_phase(raw, layer.phase))
        _keep_from_dynamo(plain)
        functools.update_wrapper(plain, raw, updated=())
        return plain
    if layer.observe:
        # TRL's own name stays, so that pickles, and the hashes of `datasets`, equal the unpatched function's.
        plain = _plain(observing(raw, layer.witnessed, layer.breaker, bound=bound, in_process=in_process))
        functools.update_wrapper(plain, raw, updated=())
        return plain
    if inspect.iscoroutinefunction(raw):
        plain = _coroutine(raw, layer, bound=bound, in_process=in_process, aside=aside)
    else:
        plain = _method(raw, layer, in_process=in_process, aside=aside) if bound else _function(raw, layer)
    if traced and not inspect.iscoroutinefunction(raw):
        plain = _traced(raw, layer, plain, bound=bound)
    else:
        for function in (plain, elsewhere, Doing.of, *NOT_TRACED):
            _keep_from_dynamo(function)
    # __dict__ is not updated, since it would copy `_torchdynamo_orig_callable` (pytorch issue 172732).
    functools.update_wrapper(plain, raw, updated=())
    return plain


def _keep_from_dynamo(function: Any) -> None:
    """Have Dynamo neither trace nor compile this function, but still what it calls.

    It would compile the counting again for each trainer. This is what ``torch.compiler.disable(recursive=False)`` does,
    which imports Dynamo: that takes a second.
    """
    # The mark is for a caller that is being compiled: the graph breaks.
    function._torchdynamo_disable = True
    # The code is for the call itself, which is beneath compiled code then. The names have changed with torch 2.7.
    dynamo: Any = getattr(sys.modules.get("torch._C"), "_dynamo", None)
    functions: Any = getattr(dynamo, "eval_frame", None)
    if hasattr(functions, "skip_code"):
        functions.skip_code(function.__code__)
    elif hasattr(functions, "set_code_exec_strategy"):
        strategy = functions._FrameExecStrategy(functions._FrameAction.SKIP, functions._FrameAction.DEFAULT)
        functions.set_code_exec_strategy(function.__code__, strategy)


_NOT_GIVEN = object()


def _method(raw: FunctionType, layer: Layer, *, in_process: bool, aside: Aside | None) -> FunctionType:
    wrapper, breaker, witnessed = layer.wrapper, layer.breaker, layer.witnessed
    by_call, parameters = takes_call(wrapper), parameters_of_method(raw)
    form = Call if by_call else Wrapped

    def method(self: Any = _NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Any:
        if self is _NOT_GIVEN:
            self = _given_by_name(raw, kwargs)
        if breaker.broken:
            return raw(self, *args, **kwargs)
        doing = Here.thread.doing
        if not in_process and doing.key != id(self):
            doing = elsewhere(self)
        count = doing.counts.get(witnessed) or doing.of(witnessed)
        count.called += 1
        if aside is not None and aside(self):
            return raw(self, *args, **kwargs)
        bound = MethodType(raw, self) if self is not None else functools.partial(raw, None)
        call = form(bound, self, args, kwargs, parameters)
        before = form.current.set(call)
        try:
            # A copy, since a wrapper may change it, and what it was given is compared with what it hands on.
            result = wrapper(call) if by_call else wrapper(call, self, args, kwargs.copy())
        # The run can go on without the wrapper, so an error in it must not end the run.
        except Exception as error:
            if not layer.armed or not breaker.opens(error, call):
                raise
        else:
            call.end(count, result)
            return result
        finally:
            form.current.reset(before)
            call.errors = ()
        return call.result if call.calls else raw(self, *args, **kwargs)

    return _plain(method)


def _given_by_name(raw: FunctionType, kwargs: dict[str, Any]) -> Any:
    """Return the instance of a call such as ``DPOTrainer.loss(self=trainer)``, and take it out of ``kwargs``."""
    first = next(iter(inspect.signature(raw).parameters), "self")
    if first not in kwargs:
        raise TypeError(f"{raw.__qualname__}() missing 1 required positional argument: {first!r}")
    return kwargs.pop(first)


def _function(raw: FunctionType, layer: Layer) -> FunctionType:
    wrapper, breaker, witnessed = layer.wrapper, layer.breaker, layer.witnessed
    by_call, parameters = takes_call(wrapper), Parameters(raw)
    form = Call if by_call else Wrapped

    def function(*args: Any, **kwargs: Any) -> Any:
        if breaker.broken:
            return raw(*args, **kwargs)
        doing = Here.thread.doing
        count = doing.counts.get(witnessed) or doing.of(witnessed)
        count.called += 1
        call = form(raw, None, args, kwargs, parameters)
        before = form.current.set(call)
        try:
            result = wrapper(call) if by_call else wrapper(call, None, args, kwargs.copy())
        # As in a method.
        except Exception as error:
            if not layer.armed or not breaker.opens(error, call):
                raise
        else:
            call.end(count, result)
            return result
        finally:
            form.current.reset(before)
            call.errors = ()
        return call.result if call.calls else raw(*args, **kwargs)

    return _plain(function)


def _coroutine(raw: FunctionType, layer: Layer, *, bound: bool, in_process: bool, aside: Aside | None) -> FunctionType:
    """As the others, for an ``async`` function, but its errors are raised, and that it acts is not seen."""
    breaker, witnessed = layer.breaker, layer.witnessed
    wrapper = _uncounted(raw, layer.wrapper, bound=bound)

    async def method(self: Any = _NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Any:
        if self is _NOT_GIVEN:
            self = _given_by_name(raw, kwargs)
        if breaker.broken:
            return await raw(self, *args, **kwargs)
        doing = Here.thread.doing
        (doing if in_process or doing.key == id(self) else elsewhere(self)).of(witnessed).called += 1
        if aside is not None and aside(self):
            return await raw(self, *args, **kwargs)
        return await wrapper(functools.partial(raw, self), self, args, kwargs)

    async def function(*args: Any, **kwargs: Any) -> Any:
        if breaker.broken:
            return await raw(*args, **kwargs)
        Here.thread.doing.of(witnessed).called += 1
        return await wrapper(raw, None, args, kwargs)

    return _plain(method if bound else function)


def _traced(raw: FunctionType, layer: Layer, counted: FunctionType, *, bound: bool) -> FunctionType:
    """Return a function in whose place Dynamo sees the wrapper. Compiled calls are not counted."""
    breaker, compiling = layer.breaker, is_compiling()
    wrapper = _uncounted(raw, layer.wrapper, bound=bound)

    def method(*args: Any, **kwargs: Any) -> Any:
        if compiling() and args and not breaker.broken:
            # `raw.__get__` is an internal error in Dynamo on torch 2.6, and is refused under fullgraph on 2.9.
            return wrapper(functools.partial(raw, args[0]), args[0], args[1:], kwargs)
        return counted(*args, **kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        if compiling() and not breaker.broken:
            return wrapper(raw, None, args, kwargs)
        return counted(*args, **kwargs)

    return _plain(method if bound else function)


def _uncounted(raw: FunctionType, wrapper: Callable[..., Any], *, bound: bool) -> Wrapper:
    """Return the wrapper as one of wrapt's four arguments, for calls that nobody counts acts of."""
    if not takes_call(wrapper):
        return wrapper
    parameters = parameters_of_method(raw) if bound else Parameters(raw)
    parameters.read()

    def by_four(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapper(Call(wrapped, instance, args, kwargs, parameters))

    return by_four


def _plain(function: Callable[..., Any]) -> FunctionType:
    assert isinstance(function, FunctionType)
    return function


def describe(raw: Any) -> str:
    """Describe a raw descriptor: its type, its name and the location of its code."""
    function = getattr(raw, "__func__", raw)
    code = getattr(function, "__code__", None)
    location = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    kind = "" if type(raw) is FunctionType else f"{type(raw).__module__}.{type(raw).__qualname__} "
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    return f"{kind}{name}{location}"
