"""The tests that need a GPU, where there is none: they are collected, skipped with the reason, and write nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading

from gpu import tolerances

GPU = Path(__file__).parents[1] / "gpu"
torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_test_is_skipped_and_says_so() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GPU)]
    finished = subprocess.run(command, cwd=GPU.parents[1], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
    assert "sees no CUDA device; `make gpu` is for a machine that has one" in finished.stdout
    assert "passed" not in finished.stdout.splitlines()[-1]
    assert "skipped" in finished.stdout.splitlines()[-1]


def test_every_patch_that_is_named_exists() -> None:
    named = set(re.findall(r'^@patches\("([\w-]+)"\)', (GPU / "test_on_gpu.py").read_text(), re.MULTILINE))
    assert named
    assert named <= {patch.id for patch in loading.load()}


def test_a_tolerance_grows_with_the_roundoff_the_depth_and_the_length() -> None:
    usual: dict[str, Any] = {"layers": 2, "length": 256, "backward": False}
    assert tolerances.relative("float32", **usual) < 1e-3 * tolerances.relative("bfloat16", **usual)
    changes: tuple[dict[str, Any], ...] = ({"layers": 3}, {"length": 512}, {"backward": True})
    for changed in changes:
        assert tolerances.relative("float32", **{**usual, **changed}) > tolerances.relative("float32", **usual)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 8), ("float16", 11)])
def test_the_unit_roundoff_is_that_of_torch(dtype: str, bits: int) -> None:
    assert tolerances.ROUNDINGS[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2 == 2.0**-bits


def test_sums_in_float32_of_rounded_values_keep_to_the_bound() -> None:
    """A chain of matrix products, each stored in bf16, against float64: the case that the bound is derived for."""
    torch.manual_seed(0)
    width, layers = 256, 2
    for _ in range(5):
        rounded = exact = torch.randn(64, width, dtype=torch.float64)
        for _ in range(layers * tolerances.STORED_BY_A_LAYER):
            weight = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0].bfloat16()
            exact = exact @ weight.double()
            rounded = (rounded.float() @ weight.float()).bfloat16().double()
        bound = tolerances.relative("bfloat16", layers=layers, length=width, backward=False) / 2
        difference = float((rounded - exact).norm() / exact.norm())
        assert tolerances.ROUNDINGS["bfloat16"] / 10 < difference < bound
