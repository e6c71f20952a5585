"""A self-test changes nothing in the process, and whatever it does ends in a decision."""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

import pytest
from helpers.made_up_patches import identity, is_marked, mark

import trl_hotfix
from trl_hotfix.model import Outcome, Reason, State
from trl_hotfix.patching import self_test

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
        trl_hotfix.apply(strict=True)
