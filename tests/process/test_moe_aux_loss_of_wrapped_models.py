"""Real wrappers around a mixture-of-experts model: DDP on two processes, DeepSpeed's ZeRO 0 and 2.

Each trainer, model and wrapper occurs at least once, not in every combination; the proof has KTO and BCO too. Patched,
loss, gradients and evaluation are those of the plain model on the same micro-batches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from launched import LAUNCHED, TESTS

SCRIPT = LAUNCHED / "train_moe.py"
ID = "moe-aux-loss-lost-under-deepspeed"
pytestmark = pytest.mark.matrix
UNDER_DDP = [("DPO", "mixtral"), ("CPO", "qwen2_moe")]
UNDER_DEEPSPEED = [("ORPO", "mixtral", "0"), ("DPO", "qwen2_moe", "2")]


@cache
def run(
    trainer: str, model: str, *, accumulate: int = 2, deepspeed: str = "", ranks: int = 1, hotfix: str = "0"
) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    stage = ["--deepspeed", deepspeed] if deepspeed else []
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    with TemporaryDirectory() as folder:
        out = Path(folder, "out.pt")
        options = ["--trainer", trainer, "--model", model, "--accumulate", str(accumulate), *stage]
        process = subprocess.run(
            [sys.executable, *torchrun, str(SCRIPT), str(out), *options],
            env={**environment, "TRL_HOTFIX": hotfix, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            raise RuntimeError(process.stderr)
        return {**torch.load(out, weights_only=False), "stderr": process.stderr}


def assert_same_step(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=0, atol=1e-6, msg=name)
    assert result["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


def router_gradient(result: dict[str, Any]) -> float:
    return sum(
        float(gradient.norm())
        for name, gradient in result["gradients"].items()
        if name.endswith(("mlp.gate.weight", ".gate.weight"))
    )


@pytest.mark.parametrize(("trainer", "model"), UNDER_DDP)
def test_ranks_under_ddp_take_the_step_of_one_process(trainer: str, model: str) -> None:
    with pytest.raises(RuntimeError, match="'DistributedDataParallel' object has no attribute 'config'"):
        run(trainer, model, ranks=2)
    # The same number of micro-batches in one step: 2 on each of 2 ranks.
    plain = run(trainer, model, accumulate=4)
    patched = run(trainer, model, ranks=2, hotfix="1")
    assert {step["wrapped_as"] for step in patched["steps"]} == {"DistributedDataParallel"}
    # The first rank takes every second micro-batch, beginning with the first.
    assert [step["loss"] for step in patched["steps"]] == pytest.approx(
        [step["loss"] for step in plain["steps"][::2]], abs=1e-6
    )
    assert_same_step(patched, plain)
    lines = [rf"\[rank {rank}\]: INFO: \d+ repairs? on for {trainer}," for rank in range(2)]
    assert [bool(re.search(line, patched["stderr"])) for line in lines] == [True, False]


@pytest.mark.parametrize(("trainer", "model", "stage"), UNDER_DEEPSPEED)
def test_a_deepspeed_engine_takes_the_plain_models_step(trainer: str, model: str, stage: str) -> None:
    plain, unpatched = run(trainer, model), run(trainer, model, deepspeed=stage)
    patched = run(trainer, model, deepspeed=stage, hotfix="1")
    assert {step["wrapped_as"] for step in patched["steps"]} == {"DeepSpeedEngine"}
    assert len(patched["steps"]) == 2
    for expected, before, after in zip(plain["steps"], unpatched["steps"], patched["steps"], strict=True):
        assert after["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert after["loss"] - before["loss"] == pytest.approx(0.5 * after["aux_loss"], abs=1e-6)
    assert_same_step(patched, plain)
    assert router_gradient(unpatched) < 0.1 * router_gradient(plain)


@pytest.mark.parametrize(("trainer", "model"), UNDER_DDP)
def test_the_eval_loss_on_two_ranks_has_the_term(trainer: str, model: str) -> None:
    plain, patched = run(trainer, model, accumulate=4), run(trainer, model, ranks=2, hotfix="1")
    terms = [result["eval_loss"] - result["without"] for result in (plain, patched)]
    assert terms[1] == pytest.approx(terms[0], abs=1e-6)
    # Four experts, of which two are used: the auxiliary loss is 2 when they are used alike, and not less.
    assert terms[0] >= 0.5 * 2 - 1e-3


@pytest.mark.parametrize(("trainer", "model", "stage"), UNDER_DEEPSPEED)
def test_the_eval_loss_under_deepspeed_has_the_term(trainer: str, model: str, stage: str) -> None:
    plain, patched = run(trainer, model), run(trainer, model, deepspeed=stage, hotfix="1")
    unpatched = run(trainer, model, deepspeed=stage)
    terms = [result["eval_loss"] - result["without"] for result in (plain, patched, unpatched)]
    assert terms[1] == pytest.approx(terms[0], abs=1e-6)
    # Evaluation gets the plain model, so without the patch only the weights differ.
    assert min(terms) >= 0.5 * 2 - 1e-3
