"""Gradients on two ranks with completions of unequal length equal those of one process if the formula says so."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import layout

pytestmark = pytest.mark.matrix
SCRIPT = Path(__file__).with_name("train_grpo_ranks.py")


@cache
def run(normalisation: str, ranks: int) -> dict[str, Any]:
    (place,) = layout.places(["0.16.1"])
    layout.build([place])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    with TemporaryDirectory() as folder:
        out = Path(folder, "result.pt")
        command = [str(place.python), *launcher, str(SCRIPT), str(out), normalisation]
        process = subprocess.run(
            command, env=place.environment(), cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert process.returncode == 0, process.stderr
        result: dict[str, Any] = torch.load(out)
    assert result["wrapped_as"] == ("DistributedDataParallel" if ranks > 1 else "LlamaForCausalLM")
    return result


def difference(result: dict[str, Any], expected: dict[str, Any]) -> float:
    gradients, expected_gradients = result["gradients"], expected["gradients"]
    assert gradients.keys() == expected_gradients.keys()
    assert gradients
    return max(float((gradients[name] - expected_gradients[name]).abs().max()) for name in gradients)


def test_global_gives_two_ranks_the_mean_over_all_tokens() -> None:
    # Unpatched, 0.16.1 in one process divides by all tokens.
    right, unpatched, patched = run("off", 1), run("off", 2), run("global", 2)
    assert difference(unpatched, right) > 1e-2
    assert difference(patched, right) < 1e-6
    assert patched["kl"] == pytest.approx(right["kl"], abs=1e-6)
    assert unpatched["kl"] != pytest.approx(right["kl"], abs=1e-5)


def test_global_changes_nothing_in_one_process() -> None:
    assert difference(run("global", 1), run("off", 1)) == 0
    assert run("global", 1)["kl"] == run("off", 1)["kl"]


def test_sequence_gives_two_ranks_the_mean_over_sequences() -> None:
    assert difference(run("sequence", 2), run("sequence", 1)) < 1e-6
    assert difference(run("sequence", 1), run("off", 1)) > 1e-2
