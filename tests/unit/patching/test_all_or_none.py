"""A failure at any step of applying or reverting a patch leaves all of its targets patched, or none."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import trl.trainer.dpo_trainer
import trl.trainer.utils
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.matching import digests
from trl_hotfix.model import Outcome, State, Verdict
from trl_hotfix.patching import conflicts
from trl_hotfix.patching.wrappers import reference_of

METHODS = ("dpo_loss", "compute_loss", "training_step")
"""The class defines the first two, and inherits the third."""


def is_wrapped(module: ModuleType) -> Outcome:
    on = all(reference_of(vars(DPOTrainer).get(name)) is not None for name in METHODS)
    return Outcome(Verdict.FIXED if on else Verdict.REPRODUCED)


def trl_attributes() -> dict[str, dict[str, Any]]:
    """Return the attributes of TRL's modules and of the class, in their order."""
    modules = {name: module for name, module in sys.modules.items() if f"{name}.".startswith("trl.")}
    return {"class": dict(vars(DPOTrainer)), **{name: dict(vars(module)) for name, module in modules.items()}}


def identical(left_side: dict[str, dict[str, Any]], right_side: dict[str, dict[str, Any]]) -> bool:
    return all(
        list(attributes) == list(right_side[name])
        and all(right_side[name][key] is value for key, value in attributes.items())
        for name, attributes in left_side.items()
    )


OURS = str(Path(trl_hotfix.__file__).parent)


def in_time_limit(frame: FrameType) -> bool:
    own = ("time_limit", "_alarm", "_watchdog", "expire")
    return frame.f_code.co_filename.endswith("isolation.py") and frame.f_code.co_name in own


@contextmanager
def failing_at(step: int) -> Iterator[list[str]]:
    """Raise in the call number ``step`` of trl_hotfix, and list the calls before it.

    Calls that release a lock or stop a timer do not fail: nothing can recover from a failure there.
    """
    calls: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "c_call") or not path.startswith(OURS) or in_time_limit(frame):
            return
        called = argument.__name__ if event == "c_call" else frame.f_code.co_name
        if called in ("__exit__", "<genexpr>"):  # closing a generator does not fail either
            return
        calls.append(f"{called} ({Path(path).name}:{frame.f_lineno})")
        if len(calls) == step:
            raise MemoryError("in the middle")  # the exception also ends the profiling

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def every_step(act: Callable[[], Any], prepare: Callable[[], Any]) -> Iterator[str]:
    """Call ``act`` repeatedly, each time with a failure one step later, until it succeeds."""
    step = 0
    while True:
        step += 1
        prepare()
        try:
            with failing_at(step) as calls:
                act()
        except MemoryError:
            pass
        if len(calls) < step:
            return
        yield f"step {step}, {calls[-1]}"


def pass_through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


@pytest.fixture
def three_targets(declare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bodies are read once: reading takes ten thousand steps, all of them before anything is patched.
    monkeypatch.setattr(digests, "loaded", functools.cache(digests.loaded))
    # A search through all objects of the process takes longer with each test that has run before.
    monkeypatch.setattr(conflicts, "objects_of", lambda sites: [])
    declare(is_wrapped, pass_through, attribute=" ".join(f"DPOTrainer.{name}" for name in METHODS))


def test_a_failed_apply_leaves_all_targets_or_none(three_targets: None) -> None:
    trl_hotfix.apply()
    trl_hotfix.revert()
    before, steps, on = trl_attributes(), 0, 0
    for step_name in every_step(trl_hotfix.apply, trl_hotfix.revert):
        steps += 1
        if trl_hotfix.status()["made-up"].state is State.APPLIED:
            assert is_wrapped(trl.trainer.dpo_trainer).verdict is Verdict.FIXED, step_name
            on += 1
        else:
            assert identical(before, trl_attributes()), step_name
    # Most of the later ones put the layers on that say what trainers do.
    assert steps - on > 200
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    trl_hotfix.revert()
    assert identical(before, trl_attributes())


def test_revert_after_a_failed_revert_takes_all_off(three_targets: None) -> None:
    before = trl_attributes()
    steps = 0
    for step_name in every_step(trl_hotfix.revert, trl_hotfix.apply):
        steps += 1
        trl_hotfix.revert()
        assert identical(before, trl_attributes()), step_name
    assert steps > 50
