from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from trl_hotfix.patching import isolation
from trl_hotfix.patching.isolation import TimeLimitExceeded, time_limit, undisturbed


def forever() -> None:
    while True:
        sum(range(1000))


def test_fast_code_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(60):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize(
    "hang", [forever, lambda: time.sleep(60), threading.Event().wait], ids=["loop", "sleep", "lock"]
)
def test_a_hanging_main_thread_is_interrupted(hang: object) -> None:
    with pytest.raises(TimeLimitExceeded), time_limit(0.05):
        hang()  # type: ignore[operator]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_another_thread_is_interrupted_in_python_code() -> None:
    stopped: list[str] = []

    def run() -> None:
        try:
            with time_limit(0.05):
                forever()
        except TimeLimitExceeded:
            stopped.append("stopped")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert stopped == ["stopped"]


def in_a_thread(run: Callable[[], None]) -> list[BaseException]:
    raised: list[BaseException] = []

    def noting() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=noting)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return raised


def test_fast_code_in_another_thread_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending an exception or cancelling it marks the interpreter; a mark that stays slows all code down."""
    monkeypatch.setattr(isolation, "ctypes", SimpleNamespace(c_ulong=ctypes.c_ulong))

    def quick() -> None:
        with time_limit(60):
            pass

    assert in_a_thread(quick) == []


def test_a_thread_that_suppresses_the_exception_goes_on() -> None:
    def stubborn() -> None:
        with time_limit(0.05), contextlib.suppress(BaseException):
            forever()

    assert in_a_thread(stubborn) == []


def test_a_timer_of_the_program_and_its_handler_stay() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30)
        with pytest.raises(TimeLimitExceeded), time_limit(0.05):
            forever()
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
        assert not rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_except_exception_does_not_catch_the_limit() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                forever()

    with pytest.raises(TimeLimitExceeded), time_limit(0.05):
        stubborn()


def test_global_state_is_fresh_inside_and_restored_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed")
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", "ZeRO-3")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    torch.set_default_dtype(torch.bfloat16)
    before = [random.getstate()[1], numpy.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()]
    environment = dict(os.environ)
    try:
        with torch.inference_mode(), torch.device("meta"), warnings.catch_warnings(), undisturbed():
            warnings.simplefilter("error")
            assert deepspeed._hf_deepspeed_config_weak_ref is None
            drawn = torch.rand(1, requires_grad=True)
            assert (drawn.dtype, drawn.device.type) == (torch.float32, "cpu")
            assert not drawn.is_inference()
            random.random()
            numpy.random.rand()
            os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
            os.environ["NEW"] = "1"
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert deepspeed._hf_deepspeed_config_weak_ref == "ZeRO-3"
    assert dict(os.environ) == environment
    after = [random.getstate()[1], numpy.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()]
    assert before == after


def test_global_state_is_restored_after_an_error() -> None:
    environment, state = dict(os.environ), random.getstate()
    with contextlib.suppress(ZeroDivisionError), undisturbed():
        random.seed(1)
        os.environ["NEW"] = "1"
        raise ZeroDivisionError
    assert (dict(os.environ), random.getstate()) == (environment, state)
