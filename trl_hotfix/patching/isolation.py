"""Run a self-test inside the user's imports: without a trace in the process, and within a time limit."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a self-test without a trace in the process, and without the process in the self-test.

    Random states, default dtype and device, grad mode, autocast, warning filters and the environment are the same
    afterwards; inside, tensors are float32 on the CPU, gradients are on, warnings are quiet, and there is no ZeRO-3,
    under which models are made in pieces and trainers load their references from the hub.
    """
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    environment = dict(os.environ)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        deepspeed, config_name = sys.modules.get("transformers.integrations.deepspeed"), "_hf_deepspeed_config_weak_ref"
        config = getattr(deepspeed, config_name, None)
        if config is not None:
            stack.callback(setattr, deepspeed, config_name, config)
            setattr(deepspeed, config_name, None)
        if torch is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(torch.device("cpu"))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if os.environ != environment:
                os.environ.clear()
                os.environ.update(environment)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


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
