"""TRL 1.7.1 under real wrappers: DDP on two processes, and DeepSpeed's ZeRO 2.

The bug hits wrapped and plain models, so the expected step is the patched one of the plain model. Its loss is that of
the unpatched model plus the auxiliary term.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from bench.releases import layout
from launched import LAUNCHED

SCRIPT = LAUNCHED / "train_moe.py"


@cache
def run(*, accumulate: int = 2, deepspeed: str = "", ranks: int = 1, hotfix: str = "0") -> dict[str, Any]:
    place = layout.main_place("1.7.1")
    layout.build([place])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    stage = ["--deepspeed", deepspeed] if deepspeed else []
    with TemporaryDirectory() as folder:
        out = Path(folder, "out.pt")
        # Do what the .pth file of an installed trl_hotfix does.
        Path(folder, "sitecustomize.py").write_text("import trl_hotfix.autostart\ntrl_hotfix.autostart.start()\n")
        environment = place.environment("deepspeed")
        environment["PYTHONPATH"] = os.pathsep.join([folder, environment["PYTHONPATH"]])
        options = ["--trainer", "DPO", "--model", "mixtral", "--accumulate", str(accumulate), *stage]
        process = subprocess.run(
            [str(place.python), *torchrun, str(SCRIPT), str(out), *options],
            env={**environment, "TRL_HOTFIX": hotfix},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return {**torch.load(out, weights_only=False), "stderr": process.stderr}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("wrapper", "as_many", "wrapped_as"),
    [({"ranks": 2}, 4, "DistributedDataParallel"), ({"deepspeed": "2"}, 2, "DeepSpeedEngine")],
    ids=["ddp", "zero2"],
)
def test_a_wrapped_model_takes_the_plain_models_step(wrapper: dict[str, Any], as_many: int, wrapped_as: str) -> None:
    plain = run(accumulate=as_many, hotfix="1")
    unpatched, patched = run(**wrapper), run(**wrapper, hotfix="1")
    assert {step["wrapped_as"] for step in patched["steps"]} == {wrapped_as}
    for before, after in zip(unpatched["steps"], patched["steps"], strict=True):
        assert after["loss"] - before["loss"] == pytest.approx(0.5 * after["aux_loss"], abs=1e-6)
    for name, gradient in plain["gradients"].items():
        torch.testing.assert_close(patched["gradients"][name], gradient, rtol=0, atol=1e-6, msg=name)
    assert patched["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-6)
    assert "on for DPO, digest " in patched["stderr"]
