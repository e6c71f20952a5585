"""Wrappers that go wrong as training code does: once only, for one row only, without a gradient, on one rank only.

A breakage stands around a wrapper of a patch while self-test and proof run. It needs no source, so it is the same for
every patch. ``CONDITIONS`` say in which calls the wrapper is left out; ``CHANGES`` say what becomes of what it has
changed, in the arguments that it hands on or in the result: ``change(own, patched)`` gets a value of TRL and that of
the wrapper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

from trl_hotfix import call as forms
from trl_hotfix.call import Changed, Wrapped, takes_call

Wrapper = Callable[..., Any]


@dataclass
class WrapperCall:
    """One call of a wrapper, and what its breakage remembers from call to call.

    ``given`` is what the wrapper is given to call TRL's method by, in its own form.
    """

    wrapper: Wrapper
    given: Any
    memory: dict[str, Any]

    @property
    def instance(self) -> Any:
        return self.given.trainer

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(self.given.args)

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return dict(self.given.kwargs)

    def applied(self, given: Any) -> Any:
        """Call the wrapper with ``given``, in its own form."""
        if takes_call(self.wrapper):
            return self.wrapper(given)
        return self.wrapper(given, given.trainer, given.args, dict(given.kwargs))

    def hand_on(self, *args: Any, **kwargs: Any) -> Any:
        """Call TRL's method, as the wrapper would that was given ``given``."""
        if isinstance(self.given, Wrapped):
            return self.given(*args, **kwargs)
        return Changed(self.given, args, kwargs, is_changed=not self._is_given(args, kwargs))()

    def within(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the wrapper can be given instead, by which it calls ``method``."""
        form = _CallWithin if takes_call(self.wrapper) else _WrappedWithin
        # A wrapper asks for the signature and the module of the method.
        method.__wrapped__ = self.given  # type: ignore[attr-defined]
        inner = form(method, self.instance, args, dict(kwargs))
        inner.given = self.given
        return inner

    def _is_given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        own = self.given.kwargs
        return (
            len(args) == len(self.given.args)
            and all(map(is_, args, self.given.args))
            and kwargs.keys() == own.keys()
            and all(kwargs[name] is own[name] for name in own)
        )

    @property
    def is_training(self) -> bool:
        import torch

        model = getattr(self.instance, "model", None)
        return bool(getattr(model, "training", torch.is_grad_enabled()))

    @property
    def step(self) -> int:
        """The optimizer steps that this trainer has taken. Before it trains it has no state."""
        return int(getattr(getattr(self.instance, "state", None), "global_step", 0) or 0)

    def count(self, *key: Any) -> int:
        """Return how often this was asked with ``key`` before."""
        counts = self.memory.setdefault("counts", {})
        counts[key] = counts.get(key, -1) + 1
        return int(counts[key])


class _Within:
    """What acts in it acts in the call that it is within."""

    given: Any

    def act(self) -> None:
        self.acted = True
        self.given.act()

    def act_later(self) -> Any:
        self.later = self.given.act_later()
        return self.later


class _CallWithin(_Within, forms.Call): ...


class _WrappedWithin(_Within, Wrapped): ...


@contextlib.contextmanager
def _under_way(given: Any) -> Iterator[None]:
    before = given.current.set(given)
    try:
        yield
    finally:
        given.current.reset(before)


def _is_first_instance(call: WrapperCall) -> bool:
    # The instance is kept, so that no other gets its id.
    return call.memory.setdefault("instance", call.instance) is call.instance


def _is_main_rank(call: WrapperCall) -> bool:
    import torch.distributed

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


CONDITIONS: Mapping[str, Callable[[WrapperCall], bool]] = {
    "only the first call": lambda call: call.count(id(call.instance)) == 0,
    "not the first call": lambda call: call.count(id(call.instance)) > 0,
    "every other call": lambda call: call.count(id(call.instance)) % 2 == 0,
    "only the first micro-batch of a step": lambda call: call.count(id(call.instance), call.step) == 0,
    "not the first micro-batch of a step": lambda call: call.count(id(call.instance), call.step) > 0,
    "only the first step": lambda call: call.step == 0,
    "only training": lambda call: call.is_training,
    "only evaluation": lambda call: not call.is_training,
    "only the first trainer": _is_first_instance,
    "only the main rank": _is_main_rank,
}
"""In which calls the wrapper is called. In others it is left out."""


def _float_tensors(own: Any, patched: Any) -> bool:
    import torch

    return all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in (own, patched))


def _of_rows(rows: Callable[[int], Any], *, repaired: bool) -> Callable[[Any, Any], Any]:
    """Keep the repair in these rows alone, or everywhere else."""

    def change(own: Any, patched: Any) -> Any:
        import torch

        if not isinstance(own, torch.Tensor) or own.shape != patched.shape or own.dim() < 1 or len(own) < 2:
            return patched
        chosen = torch.zeros(len(own), dtype=torch.bool, device=own.device)
        chosen[rows(len(own))] = True
        chosen = (chosen if repaired else ~chosen).view(-1, *[1] * (own.dim() - 1))
        return torch.where(chosen, patched, own.to(patched.dtype))

    return change


def _arithmetic(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Compute with floating-point tensors of one shape, or with numbers."""

    def change(own: Any, patched: Any) -> Any:
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (own, patched))
        if numbers or (_float_tensors(own, patched) and own.shape == patched.shape):
            return compute(own, patched)
        return patched

    return change


def _detached(own: Any, patched: Any) -> Any:
    return patched.detach() if _float_tensors(patched, patched) and patched.requires_grad else patched


def _change_detached(own: Any, patched: Any) -> Any:
    if not _float_tensors(own, patched) or own.shape != patched.shape or not patched.requires_grad:
        return patched
    # The value is the patched one, and the gradient is TRL's.
    return own + (patched - own).detach()


def _first_row_for_all(own: Any, patched: Any) -> Any:
    import torch

    if not isinstance(patched, torch.Tensor) or patched.dim() < 1 or len(patched) < 2:
        return patched
    return patched[:1].expand_as(patched)


def _mean_for_all(own: Any, patched: Any) -> Any:
    if not _float_tensors(patched, patched) or patched.dim() < 1 or len(patched) < 2:
        return patched
    return patched.mean(0, keepdim=True).expand_as(patched)


CHANGES: Mapping[str, Callable[[Any, Any], Any]] = {
    "detached": _detached,
    "change detached": _change_detached,
    "wrong sign": _arithmetic(lambda own, patched: own - (patched - own)),
    "doubled": _arithmetic(lambda own, patched: own + 2 * (patched - own)),
    "halved": _arithmetic(lambda own, patched: own + (patched - own) / 2),
    "first row for all": _first_row_for_all,
    "mean of the rows for all": _mean_for_all,
    "only the first row": _of_rows(lambda rows: slice(0, 1), repaired=True),
    "not the last row": _of_rows(lambda rows: slice(rows - 1, rows), repaired=False),
    "only the first half": _of_rows(lambda rows: slice(0, rows // 2), repaired=True),
    "only the second half": _of_rows(lambda rows: slice(rows // 2, rows), repaired=True),
}


def _changed(own: Any, patched: Any, change: Callable[[Any, Any], Any], memory: dict[str, Any]) -> Any:
    """Return ``patched`` with ``change`` at each value in which it differs from ``own``."""
    if own is patched:
        return patched
    if isinstance(patched, dict) and isinstance(own, dict):
        changed = {name: _changed(own.get(name), value, change, memory) for name, value in patched.items()}
        if all(changed[name] is patched[name] for name in patched):
            return patched
        try:
            return type(patched)(changed)
        except TypeError:
            return patched
    if isinstance(patched, (tuple, list)) and isinstance(own, (tuple, list)) and len(own) == len(patched):
        items = [_changed(one, other, change, memory) for one, other in zip(own, patched, strict=True)]
        if all(item is value for item, value in zip(items, patched, strict=True)) or hasattr(patched, "_fields"):
            return patched
        return type(patched)(items)
    if type(own) is not type(patched) or _equal(own, patched):
        return patched
    broken = change(own, patched)
    if broken is not patched and (not _equal(broken, patched) or _grad(broken) != _grad(patched)):
        memory["had effect"] = True
    return broken


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return bool(type(one) is type(other) and isinstance(one, (int, float, str, bool)) and one == other)


def _grad(value: Any) -> Any:
    return getattr(value, "grad_fn", None)


def _between(call: WrapperCall, between: Callable[[Any, Any], Any]) -> Any:
    """Call the wrapper. ``between(own, patched)`` gives what it hands on in the place of arguments, and of a result."""
    results: list[Any] = []

    def handed_on(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = between(call.args, args), between(call.kwargs, kwargs)
        results.append(call.hand_on(*args, **kwargs))
        return results[-1]

    result = call.applied(call.within(handed_on, call.args, call.kwargs))
    return between(results[-1], result) if results else result


def changing(change: Callable[[Any, Any], Any], call: WrapperCall) -> Any:
    """Call the wrapper, and change what it has changed."""
    return _between(call, lambda own, patched: _changed(own, patched, change, call.memory))


def constant(call: WrapperCall) -> Any:
    """Return the first result for ever."""
    result = call.applied(call.given)
    if "first" in call.memory:
        call.memory["had effect"] = True
        return call.memory["first"]
    if isinstance(result, (int, float, str)) or hasattr(result, "detach"):
        call.memory["first"] = result.detach().clone().requires_grad_() if _float_tensors(result, result) else result
    return result


def twice(call: WrapperCall) -> Any:
    """Apply the wrapper to its own result. That has an effect where both applications act."""
    acted_within = False

    def inner(*args: Any, **kwargs: Any) -> Any:
        nonlocal acted_within
        given = call.within(partial(call.hand_on), args, kwargs)
        with _under_way(given):
            result = call.applied(given)
        acted_within = acted_within or _acted(given, result)
        return result

    outer = call.within(inner, call.args, call.kwargs)
    with _under_way(outer):
        result = call.applied(outer)
    if acted_within and _acted(outer, result):
        call.memory["had effect"] = True
    return result


def left_out_of(target: str, call: WrapperCall) -> Any:
    """Leave the wrapper out of one of its targets."""
    function = call.given
    while not hasattr(function, "__code__"):
        function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None) or function.func
    if f"{function.__module__}:{function.__qualname__}" == target:
        call.memory["had effect"] = True
        return call.hand_on(*call.args, **call.kwargs)
    return call.applied(call.given)


def conditional(condition: Callable[[WrapperCall], bool], call: WrapperCall) -> Any:
    """Call the wrapper in some calls, and TRL's own method in the others."""
    if condition(call):
        return call.applied(call.given)
    return call.hand_on(*call.args, **call.kwargs)


def probe(call: WrapperCall) -> Any:
    """Call the wrapper, and note what would have an effect here.

    That is each condition by which a call in which it acts would be left out, and each change of what it has changed.
    """
    effective = call.memory.setdefault("effective", set())
    left_out = {name for name, condition in CONDITIONS.items() if not condition(call)}

    def note(own: Any, patched: Any) -> Any:
        for name, change in CHANGES.items():
            memory: dict[str, Any] = {}
            _changed(own, patched, change, memory)
            if memory:
                effective.add(name)
        return patched

    result = _between(call, note)
    if _acted(call.given, result):
        effective.update(left_out)
    return result


def _acted(given: Any, result: Any) -> bool:
    """Return whether a wrapper that was given this, and has returned ``result``, acts now or may act later."""
    return given.result is not result or given.acted or given.later is not None or not given.is_unchanged()


@dataclass
class Breakage:
    """One breakage around all wrappers of a patch. ``had_effect``: something was not as the wrapper would have it."""

    name: str
    work: Callable[[WrapperCall], Any]
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each wrapper's calls remember."""

    @property
    def had_effect(self) -> bool:
        return any(memory.get("had effect") for memory in self.memory.values())

    def around(self, wrapper: Wrapper) -> Wrapper:
        memory = self.memory.setdefault(wrapper.__name__, {})

        def broken(given: Any, **options: Any) -> Any:
            with _under_way(given):
                return self.work(WrapperCall(partial(wrapper, **options) if options else wrapper, given, memory))

        def of_four(
            wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
        ) -> Any:
            # A self-test may call the wrapper itself, with any function.
            given = wrapped if isinstance(wrapped, Wrapped) else Wrapped(wrapped, instance, args, kwargs)
            return broken(given, **options)

        return forms.wrapper(broken) if takes_call(wrapper) else of_four


def ineffective(probed: Breakage) -> set[str]:
    """Return the conditions and changes that change nothing in the runs of the probe."""
    effective = set().union(*(memory.get("effective", ()) for memory in probed.memory.values()))
    return (CONDITIONS.keys() | CHANGES.keys()) - effective


def breakages(targets: list[str]) -> Iterator[Breakage]:
    """Give all breakages of a patch with these targets."""
    for name, condition in CONDITIONS.items():
        yield Breakage(name, partial(conditional, condition))
    for name, change in CHANGES.items():
        yield Breakage(name, partial(changing, change))
    yield Breakage("constant", constant)
    yield Breakage("applied twice", twice)
    if len(targets) > 1:
        for target in targets:
            yield Breakage(f"not on {target}", partial(left_out_of, target))


@contextlib.contextmanager
def broken(module: Any, wrappers: list[str], breakage: Breakage) -> Iterator[None]:
    """Have the module of a patch hold wrappers with this breakage."""
    before = {name: getattr(module, name) for name in wrappers}
    try:
        for name, wrapper in before.items():
            setattr(module, name, breakage.around(wrapper))
        yield
    finally:
        for name, wrapper in before.items():
            setattr(module, name, wrapper)
