from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from trl_hotfix.log import HEARD, log
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


def test_a_progress_bar_is_neither_shown_nor_watched(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets, tqdm = pytest.importorskip("datasets"), pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)
    datasets.enable_progress_bars()
    threads, interval = threading.enumerate(), tqdm.tqdm.monitor_interval
    with undisturbed():
        datasets.Dataset.from_dict({"a": [1]}).map(lambda row: {"b": 2})
    assert threading.enumerate() == threads
    assert capfd.readouterr().err == ""
    assert datasets.is_progress_bar_enabled()
    assert tqdm.tqdm.monitor_interval == interval > 0


def test_a_library_of_bars_without_the_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets.utils", "tqdm.std"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with undisturbed():
        pass


def test_global_state_is_restored_after_an_error() -> None:
    environment, state = dict(os.environ), random.getstate()
    with contextlib.suppress(ZeroDivisionError), undisturbed():
        random.seed(1)
        os.environ["NEW"] = "1"
        raise ZeroDivisionError
    assert (dict(os.environ), random.getstate()) == (environment, state)


def test_a_variable_that_another_thread_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OF_TEST", "OF_BOTH", "OF_OTHER", "DELETED_BY_OTHER"):
        monkeypatch.setenv(name, "before")
    kind = type(os.environ)

    def other() -> None:
        os.environ.update(OF_OTHER="other", OF_BOTH="other", NEW_OF_OTHER="other")
        del os.environ["DELETED_BY_OTHER"]

    with undisturbed():
        os.environ.update(OF_TEST="test", OF_BOTH="test", NEW_OF_TEST="test")
        assert in_a_thread(other) == []
        del os.environ["OF_TEST"]
        assert os.environ["NEW_OF_OTHER"] == os.getenv("OF_BOTH") == "other"
        with undisturbed():
            os.environ["NEW_OF_TEST"] = "inner"
        assert os.environ["NEW_OF_TEST"] == "test"
    names = ("OF_TEST", "OF_BOTH", "OF_OTHER", "DELETED_BY_OTHER", "NEW_OF_TEST", "NEW_OF_OTHER")
    assert [os.environ.get(name) for name in names] == ["before", "other", "other", None, None, "other"]
    assert type(os.environ) is kind
    monkeypatch.delenv("NEW_OF_OTHER")
    # The process has it too, and not the object alone.
    assert subprocess.check_output(["printenv", "OF_TEST"], text=True) == "before\n"


def test_two_threads_in_self_tests_put_their_own_variables_back() -> None:
    before, barrier = dict(os.environ), threading.Barrier(2)

    def one(name: str) -> Callable[[], None]:
        def run() -> None:
            with undisturbed():
                os.environ[name] = "1"
                barrier.wait(60)
                assert os.environ["FIRST"] == os.environ["SECOND"] == "1"
                barrier.wait(60)

        return run

    second = threading.Thread(target=one("SECOND"))
    second.start()
    assert in_a_thread(one("FIRST")) == []
    second.join(60)
    assert dict(os.environ) == before
    assert type(os.environ) is os._Environ


def test_what_wrappers_say_to_a_self_test_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """A wrapper that fails is heard all the same, and so are other threads, and a self-test sees it in a filter."""
    seen: list[str] = []

    def see(record: logging.LogRecord) -> bool:
        seen.append(record.getMessage())
        return True

    log.addFilter(see)
    try:
        with undisturbed():
            with undisturbed():
                log.warning("a wrapper warns")
            log.warning("another one warns")
            log.warning("a wrapper fails", extra=HEARD)
            other = threading.Thread(target=log.warning, args=("another thread",))
            other.start()
            other.join(60)
    finally:
        log.removeFilter(see)
    log.warning("afterwards")
    assert seen == ["a wrapper warns", "another one warns", "a wrapper fails", "another thread"]
    assert caplog.messages == ["a wrapper fails", "another thread", "afterwards"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_has_the_variables_from_before_a_self_test_of_another_thread() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def test() -> None:
        with undisturbed():
            os.environ["NEW"] = "1"
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=test)
    thread.start()
    assert inside.wait(60)
    pid = os.fork()
    if not pid:
        os._exit(0 if "NEW" not in os.environ and type(os.environ) is os._Environ else 1)
    go_on.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "NEW" not in os.environ
