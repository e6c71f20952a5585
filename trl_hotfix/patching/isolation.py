"""Run a self-test inside the user's imports: without a trace in the process, and within a time limit.

Other threads of the program run meanwhile. What they change stays.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from ..log import log, quiet_wrappers
from .generators import of_accelerators_restored


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a self-test without a trace in the process, and without the process in the self-test.

    Random states, those of all devices too, default dtype and device, grad mode, autocast, warning filters and the
    variables of the environment that this thread sets are the same afterwards; inside, tensors are float32 on the CPU,
    gradients are on, warnings and the logs of this thread are quiet, datasets show no progress bars, and there is no
    ZeRO-3, under which models are made in pieces and trainers load their references from the hub.
    """
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with ExitStack() as stack:
        stack.enter_context(quiet_wrappers())
        stack.enter_context(_quiet_libraries())
        stack.enter_context(_own_variables_restored())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        bar: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
        if bar is not None:
            # The first bar of a process starts a thread, also if it is not shown.
            stack.callback(setattr, bar, "monitor_interval", bar.monitor_interval)
            bar.monitor_interval = 0
        # An old datasets, or one that another thread is importing, may not have these names.
        datasets: Any = sys.modules.get("datasets.utils")
        if getattr(datasets, "is_progress_bar_enabled", bool)():
            stack.callback(datasets.enable_progress_bar)
            datasets.disable_progress_bar()
        deepspeed, config_name = sys.modules.get("transformers.integrations.deepspeed"), "_hf_deepspeed_config_weak_ref"
        config = getattr(deepspeed, config_name, None)
        if config is not None:
            stack.callback(setattr, deepspeed, config_name, config)
            setattr(deepspeed, config_name, None)
        if torch is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(of_accelerators_restored(torch))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            # Within this context every function of torch goes through Python, and takes several times as long.
            if torch.empty(0).device.type != "cpu":
                stack.enter_context(torch.device("cpu"))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Have no handler of the program, or of a library, write what this thread logs. Our log has its own way."""
    thread = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.name.partition(".")[0] == log.name

    names = ("", "transformers", "trl", "accelerate", "datasets", "peft", "torch")
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        handler.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_another_thread)


class _Change(NamedTuple):
    """A variable before a thread in a self-test changed it first, and after it changed it last. None: it is not set."""

    before: str | None
    after: str | None


_changes: dict[int, dict[str, _Change]] = {}
"""The variables that threads in self-tests have changed, by thread."""

_changes_lock = threading.Lock()


class _Environment(os._Environ[str]):
    """The class of ``os.environ`` while a self-test runs. It notes what the thread of the self-test changes."""

    def __setitem__(self, name: str, value: str) -> None:
        before = self.get(name)
        super().__setitem__(name, value)
        _note(name, before, value)

    def __delitem__(self, name: str) -> None:
        before = self.get(name)
        super().__delitem__(name)
        _note(name, before, None)


def _note(name: str, before: str | None, after: str | None) -> None:
    own = _changes.get(threading.get_ident())
    if own is not None:
        own[name] = _Change(own[name].before if name in own else before, after)


@contextmanager
def _own_variables_restored() -> Iterator[None]:
    """Put the variables back that this thread changes in the block, and no others.

    A variable that another thread changes meanwhile is left as it is. So is every one of a program that has put another
    object in the place of ``os.environ``.
    """
    thread, environment = threading.get_ident(), os.environ
    with _changes_lock:
        outer = _changes.get(thread)
        _changes[thread] = {}
        if type(environment) is os._Environ:
            environment.__class__ = _Environment
    try:
        yield
    finally:
        with _changes_lock:
            _put_back(_changes.pop(thread))
            if outer is not None:
                _changes[thread] = outer
            _plain_class_if_idle()


def _put_back(changes: dict[str, _Change]) -> None:
    for name, change in changes.items():
        if os.environ.get(name) != change.after:
            continue
        if change.before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = change.before


def _plain_class_if_idle() -> None:
    plain: Any = os._Environ
    if not _changes and type(os.environ) is _Environment:
        os.environ.__class__ = plain


def _after_fork_in_child() -> None:
    """Undo what the self-tests of other threads have changed. A child process does not have these threads."""
    global _changes_lock
    _changes_lock = threading.Lock()
    for thread in [thread for thread in _changes if thread != threading.get_ident()]:
        _put_back(_changes.pop(thread))
    _plain_class_if_idle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class TimeLimitExceeded(BaseException):
    """The code took longer than it may. It is no ``Exception``, so that no handler in that code swallows it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitExceeded`` inside the block after ``seconds``.

    In the main thread an alarm signal also wakes code that sleeps or waits for a lock. Elsewhere, on Windows, and where
    the program has a timer of its own running, only Python code is stopped.
    """
    main = threading.current_thread() is threading.main_thread()
    free = main and hasattr(signal, "setitimer") and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with _alarm(seconds) if free else _watchdog(seconds):
        yield


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded(f"no answer within {seconds:g} s")

    before = signal.getsignal(signal.SIGALRM)
    try:
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # None: a handler that was not installed from Python, which cannot be put back.
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)


@contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    lock, over, pending = threading.Lock(), False, False

    def expire() -> None:
        nonlocal pending
        with lock:
            if not over:
                pending = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimitExceeded))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TimeLimitExceeded:
        pending = False
        raise
    finally:
        with lock:
            over = True
        timer.cancel()
        # An exception that was sent at the last moment must not be raised in the user's code. Taking it back would
        # leave a mark in the interpreter that slows all code down for good, and hangs Python 3.11 under a trace
        # function.
        with suppress(TimeLimitExceeded):
            for _ in range(100 if pending else 0):
                pass  # it is raised where a loop jumps back, unless the code has already swallowed it
