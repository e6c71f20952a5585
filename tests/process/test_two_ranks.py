"""Two ranks with rows of unequal lengths have the gradients of one process with all rows, if the formula says so."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from bench.releases import layout
from launched import LAUNCHED
from launched.differences import difference

pytestmark = pytest.mark.matrix
SCRIPT = LAUNCHED / "train_on_ranks.py"


@cache
def run(case: str, release: str, ranks: int, switch: str) -> dict[str, Any]:
    place = layout.main_place(release)
    layout.build([place])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    with TemporaryDirectory() as folder:
        out = Path(folder, "result.pt")
        command = [str(place.python), *launcher, str(SCRIPT), str(out), case, switch]
        environment = {**place.environment(*(["liger"] if "liger" in case else [])), "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert process.returncode == 0, process.stderr
        result: dict[str, Any] = torch.load(out)
    assert (result["wrapped_as"] == "DistributedDataParallel") == (ranks > 1)
    return result


@pytest.mark.parametrize(
    ("case", "release"),
    [
        ("global", "0.16.1"),
        ("sequence", "0.16.1"),
        ("dapo", "0.22.0"),
        ("dapo", "1.8.0"),
        ("truncated", "0.22.0"),
        ("truncated", "1.8.0"),
        ("liger", "0.23.0"),
        ("liger", "1.10.0"),
        # In older releases of transformers each rank counts its own tokens, so two ranks are a mean of means.
        ("tokens", "1.16.0"),
        # Where they do, each rank may be weighted by its own number nevertheless.
        ("counted", "0.17.0"),
        ("experts", "0.23.0"),
        ("experts", "1.14.2"),
        ("generated", "1.16.0"),
        ("dataset", "1.16.0"),
        ("buffered, generated", "1.7.0"),
        ("buffered, generated", "1.16.0"),
        ("buffered, dataset", "1.16.0"),
        ("smoothed", "1.6.0"),
        ("smoothed", "1.16.0"),
    ],
)
def test_two_ranks_have_the_gradients_of_one_process(case: str, release: str) -> None:
    right, unpatched, patched = run(case, release, 1, "on"), run(case, release, 2, "off"), run(case, release, 2, "on")
    assert difference(patched, right) < 1e-6
    assert difference(unpatched, right) > 1e-4


@pytest.mark.parametrize("release", ["0.17.0", "1.16.0"])
def test_two_ranks_have_the_divergence_of_one_process(release: str) -> None:
    right, unpatched, patched = run("kl", release, 1, "on"), run("kl", release, 2, "off"), run("kl", release, 2, "on")
    assert right["kl"]
    assert patched["kl"] == pytest.approx(right["kl"], abs=1e-6)
    assert unpatched["kl"] != pytest.approx(right["kl"], abs=1e-5)


def test_global_changes_nothing_in_one_process() -> None:
    """Unpatched, 0.16.1 in one process divides by all tokens."""
    off, on = (run("global", "0.16.1", 1, switch) for switch in ("off", "on"))
    assert difference(on, off) == 0
    assert on["kl"] == off["kl"]
    assert run("global", "0.16.1", 2, "on")["kl"] == pytest.approx(off["kl"], abs=1e-6)
