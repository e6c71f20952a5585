"""Run inside one release: every self-test of its patches, in surroundings that a job may have set up.

    python -m bench.inside.surroundings OUT.json SECONDS NAME...

In each of these surroundings, in a fork of a process that has imported TRL, every self-test returns ``reproduced``,
and ``fixed`` once its patch is applied; after ``revert`` the observable state of the process is as before. One of the
surroundings has an active ZeRO-3 config, so DeepSpeed must be installed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.model import Outcome, Patch, State
from trl_hotfix.patching import self_test
from trl_hotfix.verification import cells

from bench.proving import release

KEEP: list[Any] = []
"""Objects that must live as long as the process: transformers holds the config of ZeRO-3 by a weak reference."""


@contextmanager
def plain() -> Iterator[None]:
    yield


@contextmanager
def meta_by_default() -> Iterator[None]:
    import torch

    torch.set_default_device("meta")
    yield


@contextmanager
def without_gradients_on_meta() -> Iterator[None]:
    import torch

    with torch.device("meta"), torch.no_grad():
        yield


@contextmanager
def inference_mode() -> Iterator[None]:
    import torch

    with torch.inference_mode():
        yield


@contextmanager
def autocast() -> Iterator[None]:
    """Enable autocast on the CPU, and as a process with a GPU does."""
    import torch

    torch.set_autocast_enabled(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def half_and_strict() -> Iterator[None]:
    import torch

    torch.set_default_dtype(torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    warnings.simplefilter("error")
    yield


@contextmanager
def under_a_dispatch_mode() -> Iterator[None]:
    """Observe every call of torch, as tracers and profilers do."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class PassThrough(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with PassThrough():
        yield


@contextmanager
def distributed() -> Iterator[None]:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield


@contextmanager
def zero_3() -> Iterator[None]:
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    KEEP.append(HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}))
    assert is_deepspeed_zero3_enabled()
    yield


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    surrounding.__name__: surrounding
    for surrounding in (
        plain,
        meta_by_default,
        without_gradients_on_meta,
        inference_mode,
        autocast,
        half_and_strict,
        under_a_dispatch_mode,
        distributed,
        zero_3,
    )
}


def process_state() -> Mapping[str, Any]:
    """Return the observable state of this process by name, for a comparison with ``==``."""
    import numpy
    import torch
    from accelerate import state
    from transformers.integrations import is_deepspeed_zero3_enabled

    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    return {
        "random": random.getstate(),
        "numpy": repr(numpy.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(0).device.type,
        "modes": len(torch.overrides._get_current_function_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads of torch": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "distributed": torch.distributed.is_initialized(),
        "zero 3": is_deepspeed_zero3_enabled(),
        "accelerate": [set(singleton._shared_state) for singleton in (state.PartialState, state.AcceleratorState)],
        "gradient accumulation": set(state.GradientState._shared_state),
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "hooks": [type(finder).__name__ for finder in sys.meta_path],
        "signals": [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "threads": sorted(repr(thread) for thread in threading.enumerate()),
        "files": len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0,
        "standard": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook),
        "logging": {
            name: (logger.level, list(logger.handlers), list(logger.filters), logger.disabled)
            for name, logger in loggers.items()
            if isinstance(logger, logging.Logger) and name != "trl_hotfix"
        },
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    texts = []
    for name, value in before.items():
        value_after = after[name]
        if name == "logging":
            # A module that a self-test imports first makes a new logger; existing loggers must not change.
            value_after = {logger: value_after[logger] for logger in value}
        if value != value_after:
            short = [repr(state)[:200] for state in (value, value_after)]
            texts.append(f"{name}: {short[0]} before, {short[1]} afterwards")
    return texts


def run_in(surrounding: str, patches: Sequence[Patch]) -> dict[str, list[str]]:
    """Return, for each patch, its failures and the changes that it left in the process."""
    findings: dict[str, list[str]] = {}
    with ExitStack() as stack:
        stack.enter_context(SURROUNDINGS[surrounding]())
        # The collector then looks at what comes now, which takes milliseconds.
        gc.freeze()
        for patch in patches:
            before = process_state()
            try:
                messages = red_green_red(patch)
            # Any error of a self-test or a release is the finding.
            except Exception:  # noqa: BLE001
                messages = [traceback.format_exc()]
            # What nobody holds any more is no trace: models that hold themselves have files of shared memory.
            gc.collect()
            findings[patch.id] = messages + differences(before, process_state())
    return findings


def red_green_red(patch: Patch) -> list[str]:
    targets = cells.runnable(gates.targets_here(patch))
    modules = [sys.modules[module] for module in dict.fromkeys(target.module for target in targets)]
    messages = []

    def expect(verdict: str) -> None:
        for module in modules:
            outcome = self_test.self_test(patch, module, patch.chosen({}))
            if not isinstance(outcome, Outcome):
                messages.append(f"{module.__name__}: {outcome.evidence['traceback']}")
            elif outcome.verdict.value != verdict:
                messages.append(f"{module.__name__}: expected {verdict}, found {outcome}")

    expect("reproduced")
    status = trl_hotfix.apply(only=[patch.id], unknown_body="try")[patch.id]
    if status.state is not State.APPLIED:
        messages.append(f"{status.state.value} ({status.reason.value}): {dict(status.evidence)}")
    expect("fixed")
    trl_hotfix.revert()
    expect("reproduced")
    return messages


def main(out: str, seconds: str, *names: str) -> None:
    patches = [patch for patch in loading.load() if gates.targets_here(patch)]
    release.warm(patches)
    answers = {name: release.in_a_fork(partial(run_in, name), patches, float(seconds)) for name in names}
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
