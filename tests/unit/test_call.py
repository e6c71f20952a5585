"""What a wrapper that takes a ``Call`` can ask and change, and what the witness sees of it."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import pickle
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.authoring import Call, act, act_of_this_call, shadowed, wrapper
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor

from helpers.layered import owner_of, put_on

BATCH, SCALE, OTHER = object(), object(), object()


class Trainer:
    def step(self, batch: Any = None, *, scale: Any = None) -> Any:
        return batch, scale

    async def wait(self, batch: Any) -> Any:
        return batch


@pytest.fixture
def owner() -> type[Trainer]:
    return owner_of(Trainer)


def seen(counts: Any, trainer: Any = None) -> tuple[int, int]:
    count = counts.process if trainer is None else counts.known(trainer)
    return count.called, count.acted


# The arguments


def every_kind(first: Any, /, second: Any, third: Any = 3, *more: Any, named: Any, other: Any = 5, **rest: Any) -> Any:
    return first, second, third, more, named, other, rest


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {"named": 4}),
        ((1,), {"second": 2, "named": 4}),
        ((1, 2, 30), {"named": 4, "other": 50}),
        ((1, 2, 30, 31, 32), {"named": 4, "extra": 6, "first": 7}),
        ((1,), {"second": 2, "third": 30, "named": 4, "extra": 6}),
    ],
)
def test_an_argument_is_found_however_it_was_passed(args: Any, kwargs: Any) -> None:
    call = Call(every_kind, None, args, kwargs)
    names = ("first", "second", "third", "more", "named", "other", "rest")
    assert tuple(call[name] for name in names) == every_kind(*args, **kwargs) == call()


@pytest.mark.parametrize("name", ["first", "second", "third", "named", "other"])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2), {"named": 4}), ((1,), {"second": 2, "named": 4}), ((1, 2, 3, 31), {"named": 4, "other": 5, "more": 6})],
)
def test_one_argument_is_replaced_and_the_others_stay(name: str, args: Any, kwargs: Any) -> None:
    call = Call(every_kind, None, args, kwargs)
    before, changed = call(), call.with_(**{name: OTHER})
    assert changed[name] is OTHER
    after = changed()
    expected = ("first", "second", "third", "more", "named", "other").index(name)
    assert after[expected] is OTHER
    assert [new for index, new in enumerate(after) if index != expected] == [
        old for index, old in enumerate(before) if index != expected
    ]


def test_collected_arguments_are_replaced_as_a_whole() -> None:
    call = Call(every_kind, None, (1, 2, 3, 31), {"named": 4, "extra": 6})
    assert call.with_(more=(7, 8), rest={"new": 9})() == (1, 2, 3, (7, 8), 4, 5, {"new": 9})
    assert call.with_(named=OTHER).with_(second=0)["named"] is OTHER


def test_a_positional_argument_that_was_not_given_is_put_in_its_place() -> None:
    def method(first: Any = 1, second: Any = 2, third: Any = 3, /) -> Any:
        return first, second, third

    assert Call(method, None, (10,)).with_(third=30)() == (10, 2, 30)


def test_the_callers_own_arguments_stay_as_they_are() -> None:
    given = {"named": 4}
    call = Call(every_kind, None, (1, 2), given)
    call.with_(named=OTHER, second=OTHER, rest={"new": 1})()
    assert (call.args, given, call()[1]) == ((1, 2), {"named": 4}, 2)


@pytest.mark.parametrize("ask", [lambda call: call["the_model"], lambda call: call.with_(the_model=1)])
def test_an_unknown_argument_is_an_error_that_lists_the_known_ones(ask: Any, owner: type[Trainer]) -> None:
    with pytest.raises(KeyError, match=r"Trainer\.step has no parameter 'the_model'; it has: batch, scale"):
        ask(Call(owner().step))


def test_a_lacking_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="lacks the argument 'named'"):
        Call(every_kind, None, (1, 2))["named"]


def test_the_parameters_are_those_of_what_a_decorator_wraps(owner: type[Trainer]) -> None:
    original = owner.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    @wrapper
    def scales(call: Call) -> Any:
        return call.with_(scale=call["batch"])()

    owner.step = step  # type: ignore[assignment, method-assign]
    put_on(owner, "step", scales)
    assert owner().step(BATCH) == (BATCH, BATCH)


# On a target


@wrapper
def passes_on(call: Call) -> Any:
    return call()


@wrapper
def same_argument(call: Call) -> Any:
    return call.with_(scale=call["scale"], batch=call["batch"])()


@wrapper
def other_argument(call: Call) -> Any:
    return call.with_(scale=OTHER)()


@wrapper
def other_then_same(call: Call) -> Any:
    return call.with_(scale=OTHER).with_(batch=call["batch"])()


@wrapper
def twice(call: Call) -> Any:
    call()
    return call()


@wrapper
def never(call: Call) -> Any:
    return call["batch"], call["scale"]


@wrapper
def other_result(call: Call) -> Any:
    return [call()]


@wrapper
def says_so(call: Call) -> Any:
    call.act()
    return call()


@wrapper
def says_so_by_a_function(call: Call) -> Any:
    act()
    return call()


@wrapper
def shadows(call: Call) -> Any:
    with shadowed(call.trainer, "name", 1):
        return call()


@wrapper
def leaves_it_open(call: Call) -> Any:
    assert call.act_later() is act_of_this_call()
    return [call()]


@pytest.mark.parametrize(
    ("wrapper_", "acted"),
    [
        (passes_on, 0),
        (same_argument, 0),
        (leaves_it_open, 0),
        *((each, 1) for each in (other_argument, other_then_same, twice, never, other_result)),
        *((each, 1) for each in (says_so, says_so_by_a_function, shadows)),
    ],
)
def test_the_witness_sees_whether_a_wrapper_acts(owner: type[Trainer], wrapper_: Any, acted: int) -> None:
    (counts,) = put_on(owner, "step", wrapper_)
    trainer = owner()
    trainer.step(BATCH, scale=SCALE)
    assert seen(counts, trainer) == (1, acted)


@pytest.mark.parametrize("name", ["klass", "static"])
def test_class_and_static_methods(owner: type[Trainer], name: str) -> None:
    (counts,) = put_on(owner, name, wrapper(lambda call: (call["batch"], call.with_(batch=OTHER)(), call.trainer)))
    batch, result, instance = getattr(owner, name)(BATCH)
    assert (batch, result) == (BATCH, OTHER)
    assert instance is (owner if name == "klass" else None)
    assert seen(counts) == (1, 1)


def test_a_function() -> None:
    layer = Layer("a-patch", 1, wrapper(lambda call: (call["batch"], call.trainer, call())), False)
    function = wrapped_descriptor(lambda batch: batch, (layer,), sys, ("sys", "f"))
    assert function(3) == (3, None, 3)


def test_a_coroutine_function(owner: type[Trainer]) -> None:
    @wrapper
    async def awaits(call: Call) -> Any:
        return [call["batch"], await call(), await call.with_(batch=OTHER)()]

    (counts,) = put_on(owner, "wait", awaits)
    trainer = owner()
    assert asyncio.run(trainer.wait(BATCH)) == [BATCH, BATCH, OTHER]
    assert seen(counts, trainer) == (1, 0)


def test_options_come_beside_the_call(owner: type[Trainer]) -> None:
    @wrapper
    def with_options(call: Call, options: Any) -> Any:
        return call.with_(scale=options["scale"])()

    put_on(owner, "step", functools.partial(with_options, options={"scale": OTHER}))
    assert owner().step(BATCH) == (BATCH, OTHER)


def test_both_forms_stand_on_one_target(owner: type[Trainer]) -> None:
    def four(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return ("four", *wrapped(*args, **kwargs))

    @wrapper
    def one(call: Call) -> Any:
        return ("one", *call())

    put_on(owner, "step", four, one, four)
    assert owner().step(BATCH, scale=SCALE) == ("four", "one", "four", BATCH, SCALE)


def test_the_inner_call_is_not_the_outer_one(owner: type[Trainer]) -> None:
    inner, outer = put_on(owner, "step", says_so_by_a_function, passes_on)
    trainer = owner()
    trainer.step(BATCH)
    assert (seen(inner, trainer), seen(outer, trainer)) == ((1, 1), (1, 0))


def test_is_training_is_the_models_own_mode() -> None:
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1))
    call = Call(len, trainer)
    assert call.is_training
    trainer.model.eval()
    assert not call.is_training


# Errors


def failing(call_first: bool, with_other: bool = False) -> Any:
    @wrapper
    def fails(call: Call) -> Any:
        if call_first:
            call.with_(scale=OTHER)() if with_other else call()
        raise ValueError("ours")

    return fails


@pytest.mark.parametrize("call_first", [False, True])
def test_an_error_of_the_wrapper_switches_the_patch_off(owner: type[Trainer], call_first: bool) -> None:
    (counts,) = put_on(owner, "step", failing(call_first), strict=False)
    trainer = owner()
    assert [trainer.step(BATCH, scale=SCALE) for _ in range(2)] == [(BATCH, SCALE)] * 2
    assert seen(counts, trainer) == (1, 0)


def test_an_error_after_a_call_with_other_arguments_is_raised(owner: type[Trainer]) -> None:
    put_on(owner, "step", failing(True, with_other=True), strict=False)
    with pytest.raises(ValueError, match="ours"):
        owner().step(BATCH, scale=SCALE)


@pytest.mark.parametrize("wrapper_", [passes_on, other_argument])
def test_an_error_of_trl_is_raised_and_leaves_the_patch_on(owner: type[Trainer], wrapper_: Any) -> None:
    def step(self: Any, batch: Any = None, *, scale: Any = None) -> Any:
        raise LookupError("TRL's own")

    owner.step = step  # type: ignore[assignment, method-assign]
    (counts,) = put_on(owner, "step", wrapper_, strict=False)
    trainer = owner()
    for _ in range(2):
        with pytest.raises(LookupError, match="TRL's own"):
            trainer.step(BATCH)
    assert seen(counts, trainer) == (2, 0)
    act()  # Outside of the calls that have failed there is none under way.


# After its end


class Batch:
    pass


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_kept_keeps_no_batch(owner: type[Trainer], fails: bool) -> None:
    def step(self: Any, batch: Any = None) -> Any:
        if fails:
            raise LookupError("TRL's own")

    calls = []

    @wrapper
    def keeps(call: Call) -> Any:
        calls.append(call)
        try:
            return call.with_(batch=call["batch"])()
        except LookupError:
            return None

    owner.step = step  # type: ignore[assignment, method-assign]
    put_on(owner, "step", keeps)
    batch = Batch()
    gone = weakref.ref(batch)
    owner().step(batch)
    del batch
    assert gone() is None
    for use in (lambda: calls[0](), lambda: calls[0]["batch"], lambda: calls[0].with_(batch=1)):
        with pytest.raises(RuntimeError, match="this call has ended"):
            use()


@pytest.mark.usefixtures("no_collection")
def test_an_error_that_is_raised_keeps_no_batch_once_it_is_handled(owner: type[Trainer]) -> None:
    def step(self: Any, batch: Any = None) -> Any:
        raise LookupError("TRL's own")

    owner.step = step  # type: ignore[assignment, method-assign]
    put_on(owner, "step", passes_on, strict=False)
    batch = Batch()
    gone = weakref.ref(batch)
    with pytest.raises(LookupError) as raised:
        owner().step(batch)
    del batch, raised
    assert gone() is None
    gc.collect()


def test_a_copy_and_a_pickle_make_the_same_call() -> None:
    call = Call(dict, None, (), {"batch": 1})
    call()
    for other in (copy.copy(call), pickle.loads(pickle.dumps(call))):
        assert (other.calls, other(), other.with_) == (0, {"batch": 1}, other.with_)


# Compiled


def test_dynamo_follows_a_traced_wrapper(owner: type[Trainer]) -> None:
    def step(self: Any, batch: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return batch * scale

    @wrapper
    def doubles(call: Call) -> Any:
        return call.with_(scale=2 * call["scale"])() + call["batch"]

    owner.step = step  # type: ignore[assignment, method-assign]
    put_on(owner, "step", doubles, traced=True)
    trainer, batch = owner(), torch.ones(2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda batch: trainer.step(batch, scale=3.0), backend="eager", fullgraph=True)
    assert compiled(batch).equal(torch.full((2,), 7.0))
    assert trainer.step(batch).equal(torch.full((2,), 3.0))
    torch._dynamo.reset()
