"""Two and three ranks with rows of unequal lengths take the step of one process, whatever shards the weights.

DDP, FSDP2 and DeepSpeed's ZeRO 1 to 3, on a CPU with gloo: two accumulated micro-batches on each rank, all rows in one
process. ``test_two_ranks.py`` has the other cases on two ranks under DDP.
"""

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
SCRIPT = LAUNCHED / "train_sharded.py"
WRAPPED_AS = {"ddp": "DistributedDataParallel", "zero": "DeepSpeedEngine"}


@cache
def run(case: str, release: str, wrapper: str, ranks: int, switch: str, *, alone: bool = False) -> dict[str, Any]:
    place = layout.main_place(release)
    layout.build([place])
    overlays = ["liger"] if "liger" in case else []
    overlays += ["deepspeed"] if wrapper.startswith("zero") and not alone else []
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with TemporaryDirectory() as folder:
        out = Path(folder, "result.pt")
        arguments = [str(SCRIPT), str(out), case, "ddp" if alone else wrapper, str(ranks), switch]
        process = subprocess.run(
            [str(place.python), *([] if alone else launcher), *arguments],
            env=place.environment(*overlays),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        result: dict[str, Any] = torch.load(out)
    if not alone:
        assert result["wrapped_as"].startswith(WRAPPED_AS.get(wrapper.rstrip("123"), "FSDP"))
    return result


@pytest.mark.parametrize(
    ("case", "release", "wrapper", "ranks"),
    [
        ("tokens", "1.16.0", "ddp", 3),
        ("experts", "1.14.2", "ddp", 3),
        ("smoothed", "1.16.0", "ddp", 3),
        ("dataset", "1.16.0", "ddp", 3),
        ("buffered", "1.16.0", "ddp", 3),
        ("pairs", "1.7.1", "ddp", 3),
        ("micro-batches", "0.23.0", "ddp", 2),
        ("micro-batches", "1.6.0", "ddp", 3),
        ("counted", "0.17.0", "ddp", 3),
        ("global", "0.16.1", "ddp", 3),
        ("sequence", "0.16.1", "ddp", 3),
        ("dapo", "1.8.0", "ddp", 3),
        ("truncated", "1.8.0", "ddp", 3),
        ("liger", "1.10.0", "ddp", 3),
        ("pairs with liger", "0.28.0", "ddp", 3),
        ("pairs with liger", "1.10.0", "ddp", 2),
        ("tokens", "1.16.0", "fsdp2", 2),
        ("smoothed", "1.16.0", "fsdp2", 3),
        ("dataset", "1.16.0", "fsdp2", 2),
        ("micro-batches", "1.6.0", "fsdp2", 2),
        *((case, "1.16.0", f"zero{stage}", 2) for case in ("tokens", "smoothed") for stage in (1, 2, 3)),
        *(
            (case, release, f"zero{stage}", 2)
            for case, release in (("pairs", "1.7.1"), ("micro-batches", "1.6.0"))
            for stage in (1, 2, 3)
        ),
    ],
)
def test_ranks_take_the_step_of_one_process(case: str, release: str, wrapper: str, ranks: int) -> None:
    right = run(case, release, "ddp", ranks, "on", alone=True)
    assert difference(run(case, release, wrapper, ranks, "on"), right) < 1e-6
    assert difference(run(case, release, wrapper, ranks, "off"), right) > 1e-4
