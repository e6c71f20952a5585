"""Real wrappers around a mixture-of-experts model: DDP on two processes, DeepSpeed's ZeRO 0 and 2.

Not every trainer with every model under every wrapper: each of them is here at least once, and the proof has KTO and
BCO too. Patched, the step is that of the plain model on the same micro-batches, loss, gradient and evaluation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("train_moe.py")
ID = "moe-aux-loss-lost-under-deepspeed"
UNDER_DDP = [("DPO", "mixtral"), ("CPO", "qwen2_moe")]
UNDER_DEEPSPEED = [("ORPO", "mixtral", "0"), ("DPO", "qwen2_moe", "2")]


@cache
def run(
    trainer: str, model: str, *, accumulate: int = 2, deepspeed: str = "", ranks: int = 1, hotfix: str = "0"
) -> dict[str, Any]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    stage = ["--deepspeed", deepspeed] if deepspeed else []
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    with TemporaryDirectory() as folder:
        out = Path(folder, "out.pt")
        asked = ["--trainer", trainer, "--model", model, "--accumulate", str(accumulate), *stage]
        done = subprocess.run(
            [sys.executable, *torchrun, str(SCRIPT), str(out), *asked],
            env={**kept, "TRL_HOTFIX": hotfix, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return {**torch.load(out, weights_only=False), "stderr": done.stderr}


def assert_same_step(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, gradient in theirs["gradients"].items():
        torch.testing.assert_close(ours["gradients"][name], gradient, rtol=0, atol=1e-6, msg=name)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-6)


def router_gradient(seen: dict[str, Any]) -> float:
    return sum(
        float(it.norm()) for name, it in seen["gradients"].items() if name.endswith(("mlp.gate.weight", ".gate.weight"))
    )


@pytest.mark.parametrize(("trainer", "model"), UNDER_DDP)
def test_two_ranks_under_ddp_take_the_step_of_one_process_and_fail_without_the_patch(trainer: str, model: str) -> None:
    with pytest.raises(RuntimeError, match="'DistributedDataParallel' object has no attribute 'config'"):
        run(trainer, model, ranks=2)
    # As many micro-batches in one step: 2 of each of 2 ranks.
    plain = run(trainer, model, accumulate=4)
    patched = run(trainer, model, ranks=2, hotfix="1")
    assert {step["wrapped_as"] for step in patched["steps"]} == {"DistributedDataParallel"}
    # The first rank takes every other micro-batch, from the first on.
    assert [step["loss"] for step in patched["steps"]] == pytest.approx(
        [step["loss"] for step in plain["steps"][::2]], abs=1e-6
    )
    assert_same_step(patched, plain)
    assert all(f"[rank {rank}]: INFO: applied {ID}" in patched["stderr"] for rank in range(2))


@pytest.mark.parametrize(("trainer", "model", "stage"), UNDER_DEEPSPEED)
def test_a_deepspeed_engine_takes_the_step_of_the_plain_model_and_another_without_the_patch(
    trainer: str, model: str, stage: str
) -> None:
    plain, unpatched = run(trainer, model), run(trainer, model, deepspeed=stage)
    patched = run(trainer, model, deepspeed=stage, hotfix="1")
    assert {step["wrapped_as"] for step in patched["steps"]} == {"DeepSpeedEngine"}
    assert len(patched["steps"]) == 2
    for right, before, after in zip(plain["steps"], unpatched["steps"], patched["steps"], strict=True):
        assert after["loss"] == pytest.approx(right["loss"], abs=1e-6)
        assert after["loss"] - before["loss"] == pytest.approx(0.5 * after["aux_loss"], abs=1e-6)
    assert_same_step(patched, plain)
    assert router_gradient(unpatched) < 0.1 * router_gradient(plain)


@pytest.mark.parametrize(("trainer", "model"), UNDER_DDP)
def test_the_loss_of_an_evaluation_on_two_ranks_has_the_term(trainer: str, model: str) -> None:
    plain, patched = run(trainer, model, accumulate=4), run(trainer, model, ranks=2, hotfix="1")
    terms = [seen["eval_loss"] - seen["without"] for seen in (plain, patched)]
    assert terms[1] == pytest.approx(terms[0], abs=1e-6)
    # Four experts, of which two are used: the auxiliary loss is 2 when they are used alike, and not less.
    assert terms[0] >= 0.5 * 2 - 1e-3


@pytest.mark.parametrize(("trainer", "model", "stage"), UNDER_DEEPSPEED)
def test_the_loss_of_an_evaluation_under_deepspeed_has_the_term(trainer: str, model: str, stage: str) -> None:
    plain, patched = run(trainer, model), run(trainer, model, deepspeed=stage, hotfix="1")
    unpatched = run(trainer, model, deepspeed=stage)
    terms = [seen["eval_loss"] - seen["without"] for seen in (plain, patched, unpatched)]
    assert terms[1] == pytest.approx(terms[0], abs=1e-6)
    # Evaluation is given the plain model, so that it is only the weights that are others without the patch.
    assert min(terms) >= 0.5 * 2 - 1e-3
