"""A wrapper that fails in a call switches its patch off, and TRL's method goes on."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo
from accelerate.utils import memory
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.errors import NotAppliedError
from trl_hotfix.model import Outcome, Reason, State, Verdict, Wrapper
from trl_hotfix.patching.breaker import Breaker
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor

from helpers.made_up_patches import MARK, identity, is_marked, mark, pass_through, stub_loss

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def method(batch: Any, scale: int = 1) -> Any:
    if batch == "bad":
        raise KeyError("TRL's own")
    return (batch, scale)


def patched(
    *wrappers: Wrapper, function: Any = method, armed: bool = True, strict: bool = False, traced: bool = False
) -> tuple[Any, Breaker]:
    """Return ``function`` with these wrappers of one patch, the last one outermost."""
    breaker = Breaker("a-patch", lambda: strict)
    for wrapper in wrappers:
        layer = Layer("a-patch", 1, wrapper, traced, breaker=breaker, armed=armed)
        function = wrapped_descriptor(function, (layer,), None, ("trl.made_up", "method"))
    return function, breaker


def before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError("ours")


def after(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    raise RuntimeError("ours")


# What is returned


@pytest.mark.parametrize("wrapper", [before, after])
def test_a_failing_wrapper_returns_the_unpatched_result(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    function, breaker = patched(wrapper)
    for _ in range(3):
        assert function("batch", scale=2) == ("batch", 2)
    assert (breaker.broken, breaker.error) == (True, "RuntimeError: ours")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "a-patch failed in a call (RuntimeError: ours) and is NOT on any more" in record.getMessage()


def test_the_method_is_called_once_when_a_wrapper_fails_later() -> None:
    calls: list[Any] = []

    def noting(batch: Any) -> None:
        calls.append(batch)

    patched(after, function=noting)[0]("batch")
    assert calls == ["batch"]


def after_other_arguments(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped("other")
    raise RuntimeError("ours")


def after_its_own_keywords(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    kwargs["scale"] = 5
    wrapped(*args, **kwargs)
    raise RuntimeError("ours")


def after_fewer_keywords(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    kwargs.pop("scale")
    wrapped(*args, **kwargs)
    raise RuntimeError("ours")


def twice(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    wrapped(*args, **kwargs)
    after(wrapped, instance, args, kwargs)


def after_a_failed_try(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        wrapped("bad")
    except KeyError:
        wrapped(*args, **kwargs)
    raise RuntimeError("ours")


def in_the_handler(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        wrapped("bad")
    except KeyError as error:
        raise RuntimeError("ours") from error


MIXED = [after_other_arguments, after_its_own_keywords, after_fewer_keywords, twice, after_a_failed_try, in_the_handler]


@pytest.mark.parametrize("wrapper", MIXED)
def test_a_mixed_result_is_an_error_that_names_the_patch(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    function, breaker = patched(wrapper)
    with pytest.raises(RuntimeError, match="ours"):
        function("batch", scale=2)
    assert (breaker.broken, breaker.error) == (False, None)
    assert "TRL_HOTFIX_SKIP=a-patch" in caplog.text


def test_a_wrapper_that_fails_while_it_handles_an_error_of_trl_returns_no_result() -> None:
    """TRL's method was called once, with its own arguments, and has no result that could be returned."""

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except KeyError:
            raise RuntimeError("ours") from None

    with pytest.raises(RuntimeError, match="ours"):
        patched(wrapper)[0]("bad")


def test_a_wrapper_may_change_its_keywords_before_it_fails() -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        kwargs.clear()
        raise RuntimeError("ours")

    assert patched(wrapper)[0]("batch", scale=2) == ("batch", 2)


# Errors of TRL


def again(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except KeyError:
        return wrapped(*args, **kwargs)


def first_error_after_two(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    try:
        return wrapped(*args, **kwargs)
    except KeyError as error:
        with pytest.raises(KeyError):
            wrapped(*args, **kwargs)
        raise error


@pytest.mark.parametrize("wrapper", [pass_through, again, first_error_after_two])
def test_an_error_of_trl_is_raised_without_a_warning(wrapper: Any, caplog: pytest.LogCaptureFixture) -> None:
    function, breaker = patched(wrapper)
    with pytest.raises(KeyError, match="TRL's own"):
        function("bad")
    assert not breaker.broken
    assert not caplog.records


def test_a_wrapper_that_tries_again_returns_its_result() -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except KeyError:
            return wrapped("good")

    assert patched(wrapper)[0]("bad") == ("good", 1)


def test_an_error_of_trl_in_an_inner_wrapper_is_raised_through_the_outer_one(caplog: pytest.LogCaptureFixture) -> None:
    function, breaker = patched(pass_through, pass_through)
    with pytest.raises(KeyError, match="TRL's own"):
        function("bad")
    assert not breaker.broken
    assert not caplog.records


# What the breaker does not hold back


def test_an_unarmed_wrapper_raises_its_error() -> None:
    function, breaker = patched(before, armed=False)
    with pytest.raises(RuntimeError, match="ours"):
        function("batch")
    assert not breaker.broken


def raising(error: BaseException) -> Wrapper:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        raise error

    return wrapper


class OutOfMemoryError(Exception):
    """Some libraries have one of their own."""


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OutOfMemoryError("cudaMalloc"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        NotAppliedError("strict"),
    ],
    ids=repr,
)
def test_interrupts_and_a_full_memory_are_raised(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    function, breaker = patched(raising(error))
    with pytest.raises(type(error)) as raised:
        function("batch")
    assert raised.value is error
    assert not breaker.broken
    assert not caplog.records


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [RuntimeError(3), RuntimeError(), RuntimeError(b"x", None), Unprintable()], ids=repr)
def test_any_other_error_is_held_back(error: Exception) -> None:
    function, breaker = patched(raising(error))
    assert function("batch") == ("batch", 1)
    assert breaker.error is not None
    assert breaker.error.startswith(type(error).__name__)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_accelerate_finds_a_batch_size_that_fits_a_wrapper(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "clear_device_cache", lambda **arguments: None)
    sizes = []

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        sizes.append(args[0])
        if args[0] > 4:
            raise kind("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return wrapped(*args, **kwargs)

    function, breaker = patched(wrapper)

    def train(batch_size: int) -> Any:
        return function(batch_size)

    find: Any = memory.find_executable_batch_size
    assert find(train, starting_batch_size=16)() == (4, 1)
    assert sizes == [16, 8, 4]
    assert not breaker.broken


# What a wrapper sees


def test_a_wrapper_sees_the_signature_and_the_name() -> None:
    described: list[Any] = []

    def looks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        described.extend([inspect.signature(wrapped), wrapped.__name__])
        return wrapped(*args, **kwargs)

    patched(looks)[0]("batch")
    assert described == [inspect.signature(method), "method"]


# Several wrappers of a patch


def fails_on_bad(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if args[0] == "fail":
        raise RuntimeError("ours")
    return MARK


def test_the_error_of_one_wrapper_switches_every_target_of_the_patch_off(declare: Any) -> None:
    declare(is_marked, fails_on_bad, attribute="DPOTrainer.dpo_loss DPOTrainer.compute_loss")
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    trainer: Any = object.__new__(DPOTrainer)
    assert (stub_loss(), trainer.compute_loss("model", {})) == (MARK, MARK)
    calls: list[Callable[[], Any]] = [lambda: trainer.compute_loss("fail", {}), stub_loss]
    for call in calls:
        with pytest.raises(AttributeError):  # raised by TRL, for the trainer was never constructed
            call()
    assert identity(trl_hotfix.status()) == (State.FAILED, Reason.WRAPPER_ERROR)
    trl_hotfix.revert()
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    assert stub_loss() == MARK


def test_an_error_of_another_patch_leaves_a_patch_on(declare: Any) -> None:
    declare(is_marked, mark)
    verdicts = iter([Verdict.REPRODUCED, Verdict.FIXED])
    declare(lambda module: Outcome(next(verdicts)), before, id="another", attribute="DPOTrainer.compute_loss")
    assert trl_hotfix.apply().ok
    with pytest.raises(AttributeError):  # raised by TRL
        object.__new__(DPOTrainer).compute_loss("model", {})
    report = trl_hotfix.status()
    assert identity(report, "another") == (State.FAILED, Reason.WRAPPER_ERROR)
    assert identity(report) == (State.APPLIED, Reason.PROVEN)
    assert stub_loss() == MARK


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def double(x: Any) -> Any:
    return x * 2


def add_100(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs) + 100


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_code_of_a_traced_target_goes_off_with_its_patch() -> None:
    function, breaker = patched(add_100, function=double, traced=True)
    compiled = torch.compile(lambda x: function(x) + 1, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 103.0
    breaker.broken = True
    assert compiled(torch.ones(1)).item() == function(torch.ones(1)).item() + 1 == 3.0


async def coroutine(batch: Any) -> Any:
    return batch


def finished(awaited: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        awaited.send(None)
    return end.value.value


def test_a_coroutine_function_goes_off_with_its_patch() -> None:
    async def marks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return MARK, await wrapped(*args, **kwargs)

    function, breaker = patched(marks, function=coroutine)
    assert finished(function("batch")) == (MARK, "batch")
    breaker.broken = True
    assert finished(function("batch")) == "batch"


# Ways of calling


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.dpo_loss(1, 2, 3, 4),
        lambda trainer: DPOTrainer.dpo_loss(trainer, 1, 2, 3, 4),
        lambda trainer: DPOTrainer.dpo_loss(
            self=trainer,
            policy_chosen_logps=1,
            policy_rejected_logps=2,
            reference_chosen_logps=3,
            reference_rejected_logps=4,
        ),
        lambda trainer: vars(DPOTrainer)["dpo_loss"](trainer, 1, 2, 3, 4),
        lambda trainer: trainer.dpo_loss.__func__(trainer, 1, 2, 3, 4),
        lambda trainer: weakref.WeakMethod(trainer.dpo_loss)()(1, 2, 3, 4),
    ],
)
def test_every_way_of_calling_the_method_leaves_the_patch_on(call: Callable[[Any], Any], declare: Any) -> None:
    instances = []

    def sees_the_arguments(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        instances.append(instance)
        with pytest.raises(AttributeError, match="has no attribute"):
            wrapped(*args, **kwargs)
        return MARK

    declare(is_marked, sees_the_arguments)
    for strict in (False, "all"):
        trl_hotfix.apply(strict=strict)
        trainer = object.__new__(DPOTrainer)
        assert call(trainer) == MARK
        assert instances[-1] is trainer
        assert identity(trl_hotfix.status()) == (State.APPLIED, Reason.PROVEN)
    trl_hotfix.revert()


# Strict


def test_a_later_strict_apply_raises_the_next_error(declare: Any, caplog: pytest.LogCaptureFixture) -> None:
    declare(is_marked, fails_on_bad)
    trl_hotfix.apply()
    assert trl_hotfix.apply(strict="all")["made-up"].state is State.APPLIED
    trainer = object.__new__(DPOTrainer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ours"):
            trainer.dpo_loss("fail", 2, 3, 4)
    assert caplog.text.count("TRL_HOTFIX_SKIP=made-up") == 2
    assert trl_hotfix.status()["made-up"].state is State.APPLIED


def test_a_later_apply_that_is_not_strict_holds_the_next_error_back(declare: Any) -> None:
    declare(is_marked, fails_on_bad)
    trl_hotfix.apply(strict="all")
    trl_hotfix.apply(strict=False)
    with pytest.raises(AttributeError):  # raised by TRL
        object.__new__(DPOTrainer).dpo_loss("fail", 2, 3, 4)
    assert identity(trl_hotfix.status()) == (State.FAILED, Reason.WRAPPER_ERROR)


# What stays in memory


class Batch:
    """Stands for a tensor: it says when it is gone."""


def double_batch(batch: Any) -> Any:
    if not isinstance(batch, Batch):
        raise KeyError("TRL's own", batch)
    return [batch, Batch()]


def uses_and_fails(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    outputs = wrapped(*args, **kwargs)
    raise RuntimeError("ours", outputs, args)


def fails_first(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError("ours", args)


def step_with(function: Callable[..., Any]) -> weakref.ref[Any]:
    batch = Batch()
    function(batch)
    return weakref.ref(batch)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("wrapper", [uses_and_fails, fails_first])
def test_nothing_of_the_failing_step_stays_alive(wrapper: Any) -> None:
    function, breaker = patched(wrapper, function=double_batch)
    assert step_with(function)() is None
    assert breaker.broken


def swallowed_step(function: Callable[..., Any]) -> weakref.ref[Any]:
    class Other:
        pass

    batch = Other()
    try:
        function(batch)
    except (KeyError, RuntimeError):
        pass
    else:
        raise AssertionError("no error")
    return weakref.ref(batch)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("wrappers", [[pass_through], [again], [pass_through, pass_through]], ids=["1", "again", "2"])
def test_nothing_stays_alive_after_an_error_of_trl_that_the_caller_swallows(wrappers: Any) -> None:
    function, breaker = patched(*wrappers, function=double_batch)
    assert swallowed_step(function)() is None
    assert not breaker.broken


@pytest.mark.usefixtures("no_collection")
def test_nothing_stays_alive_after_an_error_of_ours_that_the_caller_swallows() -> None:
    function, _ = patched(fails_first, function=double_batch, strict=True)
    assert swallowed_step(function)() is None


@pytest.mark.usefixtures("no_collection")
def test_what_keeps_the_wrapped_method_does_not_keep_the_batch() -> None:
    kept: list[Any] = []

    def keeps(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        kept.append(wrapped)
        return wrapped(*args, **kwargs)

    function, _ = patched(keeps, function=double_batch)
    assert step_with(function)() is None
    assert type(kept[0].__wrapped__) is FunctionType


@pytest.mark.usefixtures("no_collection")
def test_the_engine_keeps_nothing_of_the_failing_step(declare: Any) -> None:
    def fails_later(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(args[0], Batch):
            return uses_and_fails(wrapped, instance, args, kwargs)
        return MARK

    declare(is_marked, fails_later)
    trl_hotfix.apply()

    def train(batch: Any) -> None:
        with pytest.raises(AttributeError):
            object.__new__(DPOTrainer).dpo_loss(batch, 2, 3, 4)

    reference = step_with(train)
    gc.collect()  # pytest.raises keeps the error of TRL in a circle
    assert reference() is None
