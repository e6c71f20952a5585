"""The witness counts each trainer's calls, and those in which a wrapper acted."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import itertools
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from datasets.fingerprint import Hasher

from trl_hotfix import witness
from trl_hotfix.authoring import act, act_of_this_call, shadowed
from trl_hotfix.call import Mark, Wrapped
from trl_hotfix.model import Wrapper
from trl_hotfix.patching.wrappers import wrapped_descriptor
from trl_hotfix.witness import Count, Witnessed

from helpers.layered import Counted, layer_of, owner_of, put_on


class Trainer:
    def step(self, batch: Any = None, *, scale: Any = None) -> Any:
        return batch

    async def wait(self) -> Any:
        return self


def passes_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


def numbers(count: Count | None) -> tuple[int, int] | None:
    return None if count is None else (count.called, count.acted)


@pytest.fixture
def owner() -> type[Trainer]:
    return owner_of(Trainer)


# By instance


def test_each_instance_has_its_own_count(owner: type[Trainer]) -> None:
    (counts,) = put_on(owner, "step", lambda wrapped, instance, args, kwargs: "ours" if args[0] == 1 else wrapped(2))
    first, second, never = owner(), owner(), owner()
    for trainer, batch in ((first, 1), (first, 1), (second, 2), (first, 2), (second, 2)):
        trainer.step(batch)
    assert numbers(counts.known(first)) == (3, 2)
    assert numbers(counts.known(second)) == (2, 0)
    assert counts.known(never) is None
    assert numbers(counts.process) == (0, 0)


@pytest.mark.usefixtures("no_collection")
def test_an_instance_that_is_gone_leaves_nothing(owner: type[Trainer]) -> None:
    before = dict(witness._ledgers._by_id)
    put_on(owner, "step", passes_on)
    trainer = owner()
    trainer.step()
    gone = weakref.ref(trainer)
    assert len(witness._ledgers._by_id) == len(before) + 1
    del trainer
    assert gone() is None
    assert witness._ledgers._by_id == before


def test_an_instance_in_a_circle_leaves_nothing_once_it_is_collected(owner: type[Trainer]) -> None:
    before = dict(witness._ledgers._by_id)
    put_on(owner, "step", passes_on)
    trainer = owner()
    trainer.itself = trainer  # type: ignore[attr-defined]
    trainer.step()
    del trainer
    gc.collect()
    assert witness._ledgers._by_id == before


def test_an_id_that_is_used_again_begins_at_0(owner: type[Trainer]) -> None:
    (counts,) = put_on(owner, "step", passes_on)
    trainer = owner()
    key = id(trainer)
    trainer.step()
    kept = []
    del trainer
    # The memory of a small object is usually given to the next one of the same size.
    while id(trainer := owner()) != key and len(kept) < 10_000:
        kept.append(trainer)
    assert id(trainer) == key
    assert counts.known(trainer) is None
    trainer.step()
    assert numbers(counts.known(trainer)) == (1, 0)


def test_a_call_of_a_finaliser_is_counted_for_no_other_instance(owner: type[Trainer]) -> None:
    put_on(owner, "step", passes_on)

    class Finalised(owner):  # type: ignore[misc, valid-type]
        def __del__(self) -> None:
            self.step()

    trainer = Finalised()
    trainer.itself = trainer
    trainer.step()
    key = id(trainer)
    del trainer
    gc.collect()
    assert key not in witness._ledgers._by_id


def test_a_copy_begins_at_0(owner: type[Trainer]) -> None:
    (counts,) = put_on(owner, "step", passes_on)
    trainer = owner()
    trainer.step()
    copied = copy.copy(trainer)
    copied.step()
    assert (numbers(counts.known(trainer)), numbers(counts.known(copied))) == ((1, 0), (1, 0))


class Unhashable(Trainer):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")


class Slots:
    __slots__ = ()

    def step(self, batch: Any = None) -> Any:
        return batch


def test_unhashable_instances_that_cannot_be_compared_have_counts() -> None:
    cls = type("Unhashable", (Unhashable,), {"step": Trainer.step})
    (counts,) = put_on(cls, "step", passes_on)
    first, second = cls(), cls()
    for trainer in (first, second, first):
        trainer.step(trainer)
    assert (numbers(counts.known(first)), numbers(counts.known(second))) == ((2, 0), (1, 0))


def test_an_instance_that_cannot_be_referenced_weakly_counts_for_the_process() -> None:
    before = dict(witness._ledgers._by_id)
    cls = type("Slots", (Slots,), {"__slots__": (), "step": Slots.step})
    (counts,) = put_on(cls, "step", passes_on)
    first, second = cls(), cls()
    assert [trainer.step(3) for trainer in (first, second, first)] == [3, 3, 3]
    assert numbers(counts.process) == (3, 0)
    assert counts.known(first) is None
    assert witness._ledgers._by_id == before


@pytest.mark.parametrize("stand_in", [None, 3, "text"])
def test_a_method_may_be_called_with_anything_as_its_instance(owner: type[Trainer], stand_in: Any) -> None:
    (counts,) = put_on(owner, "step", passes_on)
    assert vars(owner)["step"](stand_in, "batch") == "batch"
    assert numbers(counts.process) == (1, 0)


# What belongs to the process


@pytest.mark.parametrize("name", ["klass", "static"])
def test_class_and_static_methods_belong_to_the_process(owner: type[Trainer], name: str) -> None:
    before = dict(witness._ledgers._by_id)
    (counts,) = put_on(owner, name, lambda wrapped, instance, args, kwargs: wrapped("other"))
    getattr(owner, name)("batch")
    getattr(owner(), name)("batch")
    assert numbers(counts.process) == (2, 2)
    assert witness._ledgers._by_id == before


def test_a_function_belongs_to_the_process() -> None:
    layer = layer_of("a-patch", passes_on)
    function = wrapped_descriptor(lambda batch: batch, (layer,), sys, ("sys", "f"))
    assert function(3) == 3
    assert numbers(Counted(layer.witnessed).process) == (1, 0)


def test_a_coroutine_function_counts_its_calls(owner: type[Trainer]) -> None:
    async def awaits(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        act()
        return await wrapped(*args, **kwargs)

    (counts,) = put_on(owner, "wait", awaits)
    trainer = owner()
    assert asyncio.run(trainer.wait()) is trainer
    assert numbers(counts.known(trainer)) == (1, 0)


# Acting

BATCH, SCALE, LOSS = object(), object(), object()


def changed_result(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    return "other"


def changed_argument(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped("other", **kwargs)


def changed_keyword(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, scale="other")


def changed_keyword_in_place(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    kwargs["scale"] = "other"
    return wrapped(*args, **kwargs)


def dropped_keyword(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    del kwargs["scale"]
    return wrapped(*args, **kwargs)


def called_twice(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    return wrapped(*args, **kwargs)


def never_called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def says_so(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    act()
    return wrapped(*args, **kwargs)


def marks_its_call(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    act_of_this_call()()
    return wrapped(*args, **kwargs)


def shadows(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with shadowed(instance, "name", 1):
        return wrapped(*args, **kwargs)


ACTING = [
    changed_result,
    changed_argument,
    changed_keyword,
    changed_keyword_in_place,
    dropped_keyword,
    called_twice,
    never_called,
    says_so,
    marks_its_call,
    shadows,
]


@pytest.mark.parametrize("wrapper", ACTING)
def test_a_wrapper_that_changes_something_acts_once_a_call(owner: type[Trainer], wrapper: Any) -> None:
    (counts,) = put_on(owner, "step", wrapper)
    trainer = owner()
    for calls in (1, 2):
        trainer.step(BATCH, scale=SCALE)
        assert numbers(counts.known(trainer)) == (calls, calls)


def reads_the_name(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    assert (wrapped.__name__, wrapped.__self__) == ("step", instance)
    assert wrapped.__func__ is wrapped.__wrapped__.__func__
    assert list(inspect.signature(wrapped).parameters) == ["batch", "scale"]
    act_of_this_call()
    return wrapped(*args, **dict(kwargs))


@pytest.mark.parametrize("wrapper", [passes_on, reads_the_name])
def test_a_wrapper_that_changes_nothing_does_not_act(owner: type[Trainer], wrapper: Any) -> None:
    (counts,) = put_on(owner, "step", wrapper)
    trainer = owner()
    trainer.step(BATCH, scale=SCALE)
    trainer.step()
    assert numbers(counts.known(trainer)) == (2, 0)


def returning(result: Any, change: Callable[[Any], Any]) -> bool:
    """Return whether a wrapper acts that makes this of TRL's result."""
    layer = layer_of("a-patch", lambda wrapped, instance, args, kwargs: change(wrapped(*args, **kwargs)))
    wrapped_descriptor(lambda: result, (layer,), sys, ("sys", "f"))()
    return Counted(layer.witnessed).process.acted == 1


@pytest.mark.parametrize(
    ("result", "change"),
    [
        ((BATCH, LOSS), lambda result: (result[0], result[1])),
        ((), lambda result: ()),
        ({"loss": LOSS, "batch": BATCH}, dict),
        (LOSS, lambda result: result),
    ],
)
def test_an_equal_tuple_or_dictionary_of_the_same_objects_is_no_act(result: Any, change: Any) -> None:
    assert not returning(result, change)


@pytest.mark.parametrize(
    ("result", "change"),
    [
        ((BATCH, LOSS), lambda result: result[::-1]),
        ((BATCH, LOSS), lambda result: result[:1]),
        ((BATCH, LOSS), list),
        ((1.5,), lambda result: (result[0] + 0.0,)),
        ({"loss": LOSS}, lambda result: {"loss": BATCH}),
        ({"loss": LOSS}, lambda result: {"other": LOSS}),
        ({"loss": LOSS}, lambda result: {**result, "more": LOSS}),
        ({"a": 1, "b": 2}, lambda result: {"b": 2, "a": 1}),
        (None, lambda result: LOSS),
        (LOSS, lambda result: None),
    ],
)
def test_another_result_is_an_act(result: Any, change: Any) -> None:
    assert returning(result, change)


def fails(batch: Any = None) -> Any:
    raise KeyError("TRL's own")


def test_a_wrapper_that_swallows_an_error_of_trl_acts() -> None:
    def swallows(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        with pytest.raises(KeyError):
            wrapped(*args, **kwargs)

    layer = layer_of("a-patch", swallows)
    assert wrapped_descriptor(fails, (layer,), sys, ("sys", "f"))() is None
    assert numbers(Counted(layer.witnessed).process) == (1, 1)


def test_a_wrapper_that_tries_again_after_an_error_of_trl_acts(owner: type[Trainer]) -> None:
    errors = iter([KeyError("TRL's own"), None, None])

    def step(self: Any, batch: Any) -> Any:
        error = next(errors)
        if error is not None:
            raise error
        return batch

    def tries_again(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except KeyError:
            return wrapped(*args, **kwargs)

    owner.step = step  # type: ignore[assignment, method-assign]
    (counts,) = put_on(owner, "step", tries_again)
    trainer = owner()
    assert trainer.step(BATCH) is BATCH
    assert numbers(counts.known(trainer)) == (1, 1)
    assert trainer.step(BATCH) is BATCH
    assert numbers(counts.known(trainer)) == (2, 1)


def test_a_call_that_raises_is_called_and_has_not_acted() -> None:
    layer = layer_of("a-patch", says_so)
    layer.armed = True
    with pytest.raises(KeyError):
        wrapped_descriptor(fails, (layer,), sys, ("sys", "f"))()
    assert numbers(Counted(layer.witnessed).process) == (1, 0)


def test_a_wrapper_that_is_off_is_not_called(owner: type[Trainer]) -> None:
    def breaks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("ours")

    layer = layer_of("a-patch", breaks)
    layer.armed = True
    layer.breaker._strict = bool
    function = wrapped_descriptor(lambda batch: batch, (layer,), sys, ("sys", "f"))
    assert [function(3) for _ in range(3)] == [3, 3, 3]
    assert numbers(Counted(layer.witnessed).process) == (1, 0)


# Saying it


@pytest.mark.parametrize("acting", [(0,), (1,), (0, 1), ()])
def test_act_marks_the_call_of_the_patch_that_says_it(owner: type[Trainer], acting: tuple[int, ...]) -> None:
    def wrapper(number: int) -> Wrapper:
        return says_so if number in acting else passes_on

    counts = put_on(owner, "step", wrapper(0), wrapper(1))
    trainer = owner()
    trainer.step(BATCH)
    assert [numbers(count.known(trainer)) for count in counts] == [(1, int(number in acting)) for number in (0, 1)]


def test_act_after_the_inner_call_marks_the_outer_one(owner: type[Trainer]) -> None:
    def says_so_later(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        act()
        return result

    inner, outer = put_on(owner, "step", passes_on, says_so_later)
    trainer = owner()
    trainer.step(BATCH)
    assert (numbers(inner.known(trainer)), numbers(outer.known(trainer))) == ((1, 0), (1, 1))


class Hooked(Trainer):
    hook: Callable[[], None]

    def step(self, batch: Any = None, *, scale: Any = None) -> Any:
        self.hook()
        return batch


@pytest.mark.parametrize("hooking", [0, 1])
def test_a_hook_marks_the_call_that_has_set_it(hooking: int) -> None:
    """The hook of the outer wrapper runs while the inner wrapper is under way, and the other way round."""

    def sets_a_hook(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        instance.hook = act_of_this_call()
        return wrapped(*args, **kwargs)

    owner: Any = type("Hooked", (Hooked,), {"step": Hooked.step})
    wrappers = [sets_a_hook if number == hooking else passes_on for number in (0, 1)]
    counts = put_on(owner, "step", *wrappers)
    trainer = owner()
    trainer.step(BATCH)
    assert [numbers(count.known(trainer)) for count in counts] == [(1, int(number == hooking)) for number in (0, 1)]


def keeping(marks: list[Mark]) -> Wrapper:
    def keeps(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        marks.append(act_of_this_call())
        assert act_of_this_call() is marks[-1]
        return wrapped(*args, **kwargs)

    return keeps


def test_a_mark_after_the_end_of_its_call_counts_once(owner: type[Trainer]) -> None:
    marks: list[Mark] = []
    (counts,) = put_on(owner, "step", keeping(marks))
    trainer = owner()
    trainer.step()
    trainer.step()
    for _ in range(3):
        marks[0]()
    assert numbers(counts.known(trainer)) == (2, 1)
    marks[1]()
    assert numbers(counts.known(trainer)) == (2, 2)


def test_a_wrapper_with_a_mark_says_itself_whether_it_acts(owner: type[Trainer]) -> None:
    def keeps_and_changes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        marks.append(act_of_this_call())
        with shadowed(instance, "scale", 2):
            return [wrapped("other")]

    marks: list[Mark] = []
    (counts,) = put_on(owner, "step", keeps_and_changes)
    trainer = owner()
    trainer.step(BATCH)
    assert numbers(counts.known(trainer)) == (1, 0)
    marks[0]()
    assert numbers(counts.known(trainer)) == (1, 1)


class Batch:
    pass


@pytest.mark.usefixtures("no_collection")
def test_a_mark_keeps_neither_the_batch_nor_the_trainer(owner: type[Trainer]) -> None:
    marks: list[Mark] = []
    put_on(owner, "step", keeping(marks))
    trainer, batch = owner(), Batch()
    references = weakref.ref(trainer), weakref.ref(batch)
    trainer.step(batch)
    del trainer, batch
    assert [reference() for reference in references] == [None, None]
    marks[0]()


def test_a_mark_in_a_transform_leaves_the_hash_of_datasets_as_it_is(owner: type[Trainer]) -> None:
    marks: list[Mark] = []
    put_on(owner, "step", keeping(marks))
    trainer = owner()
    for _ in range(2):
        trainer.step()
    marks[0]()
    assert Hasher.hash(marks[0]) == Hasher.hash(marks[1]) == Hasher.hash(Mark())
    pickle.loads(pickle.dumps(marks[0]))()


def test_outside_a_call_nothing_happens(owner: type[Trainer]) -> None:
    (counts,) = put_on(owner, "step", passes_on)
    act()
    act_of_this_call()()
    assert numbers(counts.process) == (0, 0)


def test_act_of_another_thread_marks_nothing(owner: type[Trainer]) -> None:
    def in_a_thread(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        return wrapped(*args, **kwargs)

    (counts,) = put_on(owner, "step", in_a_thread)
    trainer = owner()
    trainer.step()
    assert numbers(counts.known(trainer)) == (1, 0)


# Recursion, threads


def test_each_call_of_a_recursion_is_counted(owner: type[Trainer]) -> None:
    def step(self: Any, depth: int) -> int:
        return 0 if depth == 0 else int(self.step(depth - 1)) + 1

    def acts_on_odd(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args[0] % 2:
            act()
        return wrapped(*args, **kwargs)

    owner.step = step  # type: ignore[assignment, method-assign]
    (counts,) = put_on(owner, "step", acts_on_odd)
    trainer = owner()
    assert trainer.step(5) == 5
    assert numbers(counts.known(trainer)) == (6, 3)


def test_the_calls_of_threads_are_counted_for_their_instances(owner: type[Trainer]) -> None:
    (counts,) = put_on(owner, "step", lambda wrapped, instance, args, kwargs: wrapped(*args) if args[0] else "other")
    trainers = [owner() for _ in range(4)]
    start = threading.Barrier(8)

    def work(trainer: Trainer) -> None:
        start.wait()
        for number in range(500):
            trainer.step(number % 2)

    threads = [threading.Thread(target=work, args=(trainer,)) for trainer in trainers * 2]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [numbers(counts.known(trainer)) for trainer in trainers] == [(1000, 500)] * 4


def test_a_call_within_the_look_up_of_a_count_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finaliser or a signal handler may call the same target at any line."""
    instances, each = [Batch(), Batch()], Witnessed("a-patch", "made_up:Trainer.step", 1)

    class Interrupting(Count):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            if instances[1:]:
                witness.elsewhere(instances.pop()).of(each)

    monkeypatch.setattr(witness, "Count", Interrupting)
    thread = threading.Thread(target=lambda: witness.elsewhere(instances[0]).of(each), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_the_calls_of_a_self_test_are_left_out() -> None:
    layer = layer_of("a-patch", changed_result)
    function = wrapped_descriptor(lambda batch: batch, (layer,), sys, ("sys", "f"))
    function(1)
    with witness.apart():
        function(2)
    with pytest.raises(StopIteration), witness.apart():
        function(next(iter(())))
    assert numbers(Counted(layer.witnessed).process) == (1, 1)
    function(3)
    assert numbers(Counted(layer.witnessed).process) == (2, 2)


# TRL's method as a wrapper has it


def test_a_call_can_be_copied() -> None:
    call = Wrapped(len)
    assert copy.copy(call)("four") == 4


def test_a_call_takes_any_keyword() -> None:
    names = ("self", "wrapped", "instance", "args", "kwargs", "name")
    given = dict(zip(names, itertools.count()))
    call = Wrapped(lambda **arguments: arguments, None, (), given)
    assert call(**given) == given
    assert call.is_unchanged()
