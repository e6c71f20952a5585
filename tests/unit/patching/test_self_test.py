"""A self-test changes nothing in the process, and whatever it does ends in a decision."""

from __future__ import annotations

import argparse
import decimal
import functools
import gc
import json
import signal
import sys
import time
import weakref
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.model import Outcome, Reason, State
from trl_hotfix.patching import self_test

from helpers.made_up_patches import identity, is_marked, mark

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


def test_a_self_test_changes_no_global_state(declare: Any) -> None:
    import random
    import warnings

    import numpy
    import torch

    def messes_up(module: ModuleType) -> Outcome:
        assert torch.get_default_dtype() is torch.float32
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert torch.zeros(1).device.type == "cpu"
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float16)
        warnings.simplefilter("error")
        return is_marked(module)

    def state() -> tuple[Any, ...]:
        return (
            random.getstate(),
            str(numpy.random.get_state()),
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            list(warnings.filters),
        )

    declare(messes_up, mark)
    torch.set_default_dtype(torch.float64)
    try:
        before = state()
        with torch.inference_mode(), torch.device("meta"):
            assert trl_hotfix.apply().ok
        assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "breaks", [lambda: time.sleep(60), lambda: sys.exit("bye"), lambda: "rubbish"], ids=["hangs", "exits", "rubbish"]
)
def test_an_invalid_self_test_leaves_the_patch_off(declare: Any, monkeypatch: pytest.MonkeyPatch, breaks: Any) -> None:

    monkeypatch.setattr(self_test, "SELF_TEST_SECONDS", 0.2)
    declare(lambda module: breaks(), mark)
    report = trl_hotfix.apply()
    assert identity(report) == (State.FAILED, Reason.SELF_TEST_ERROR)
    with pytest.raises(trl_hotfix.NotAppliedError):
        trl_hotfix.apply(strict="all")


def test_context_variables_of_a_self_test_stay_inside(declare: Any) -> None:
    said: ContextVar[str] = ContextVar("said", default="before")

    def says(module: ModuleType) -> Outcome:
        said.set("inside")
        decimal.setcontext(decimal.Context(prec=3))
        return is_marked(module)

    precision = decimal.getcontext().prec
    declare(says, mark)
    assert trl_hotfix.apply().ok
    assert (said.get(), decimal.getcontext().prec) == ("before", precision)


# An exit during a self-test


class Handler:
    """A handler of the program that ends it, as an object, a method or a function."""

    def __call__(self, number: int, frame: Any) -> None:
        self.method(number, frame)

    def method(self, number: int, frame: Any) -> None:
        sys.exit(77)


def exit_by_name(number: int, frame: Any, code: int = 0) -> None:
    exit(code)


HANDLERS = {
    "function": lambda number, frame: sys.exit(77),
    "method": Handler().method,
    "object": Handler(),
    "partial": functools.partial(exit_by_name, code=77),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("inside", ["the test", "a library"])
def test_a_signal_handler_that_exits_ends_the_program(declare: Any, handler: Any, inside: str) -> None:
    def is_told_to_end(module: ModuleType) -> Outcome:
        if inside == "the test":
            signal.raise_signal(signal.SIGTERM)
        else:
            json.dumps([0], default=None, cls=RaisesSignal)
        return is_marked(module)

    class RaisesSignal(json.JSONEncoder):
        def encode(self, o: Any) -> str:
            signal.raise_signal(signal.SIGTERM)
            return super().encode(o)

    declare(is_told_to_end, mark)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit) as ended:
            trl_hotfix.apply()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 77
    # The interrupted patch waits, and is off.
    declared = trl_hotfix.patching.engine.ENGINE._registry.all()
    assert [module_patch.decision.state for module_patch in declared] == [State.PENDING]


def test_an_exit_of_other_code_ends_the_program(declare: Any, tmp_path: Path) -> None:
    """Such as an exception that another thread sends, in a callback of the program."""
    namespace: dict[str, Any] = {}
    exec(compile("import sys\ndef leave(): sys.exit(78)", str(tmp_path / "script.py"), "exec"), namespace)
    declare(lambda module: namespace["leave"](), mark)
    with pytest.raises(SystemExit) as ended:
        trl_hotfix.apply()
    assert ended.value.code == 78


def test_an_exit_of_an_argument_parser_in_a_self_test_leaves_the_patch_off(declare: Any) -> None:
    declare(lambda module: argparse.ArgumentParser().parse_args(["--no-such-option"]), mark)
    assert identity(trl_hotfix.apply()) == (State.FAILED, Reason.SELF_TEST_ERROR)


def test_a_self_test_without_memory_leaves_text_and_no_tensors(declare: Any) -> None:
    import torch

    kept: list[weakref.ref[Any]] = []

    def takes_all_memory(module: ModuleType) -> Outcome:
        batch = torch.zeros(1)
        kept.append(weakref.ref(batch))
        raise torch.OutOfMemoryError("no memory")

    declare(takes_all_memory, mark)
    report = trl_hotfix.apply()
    assert identity(report) == (State.FAILED, Reason.SELF_TEST_ERROR)
    assert "no memory" in report["made-up"].evidence["trl.trainer.dpo_trainer"]["error"]
    gc.collect()
    assert kept[0]() is None
